"""Notebooks: `%load_ext tarry` and rich displays, in a real shell of IPython."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tarry
from tarry import notebook
from tarry.events import Event
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


@pytest.fixture
def shell() -> Iterator[Any]:
    shells = pytest.importorskip("IPython.core.interactiveshell")
    made = shells.InteractiveShell.instance()
    made.run_cell("import torch, tarry\n%load_ext tarry")
    yield made
    made.run_cell("%unload_ext tarry")
    shells.InteractiveShell.clear_instance()


def test_a_cell_says_what_it_cost(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    shell.run_cell("x = torch.ones(3, device='tarry')\nassert (x + 1).sum().item() == 6").raise_error()
    shown = capsys.readouterr().out
    assert shown.startswith("tarry:\n")
    assert "\n  step (item): 1 x" in shown
    shell.run_cell("y = 1").raise_error()
    assert "tarry" not in capsys.readouterr().out


def test_a_cell_that_fails_leaves_nothing_behind(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("(torch.ones(3, device='tarry') + 1).tolist(); 1 / 0")
    assert "step (" in capsys.readouterr().out
    shell.run_cell("%unload_ext tarry")
    assert not tarry.events.watched()
    shell.run_cell("%load_ext tarry\n%load_ext tarry")
    shell.run_cell("(torch.ones(3, device='tarry') + 1).tolist()")
    assert capsys.readouterr().out.count("tarry:\n") == 1


def test_explain_is_text_with_a_display() -> None:
    text = tarry.explain(torch.ones(3, device="tarry") + 1)
    assert isinstance(text, str)
    assert text.startswith("graph(")
    shown = text._repr_html_()  # type: ignore[attr-defined]
    assert shown.startswith("<pre")
    assert "&lt;" in notebook.Text("<script>")._repr_html_()


def test_rows_are_grouped_ordered_and_escaped() -> None:
    common = {"file": "<b>.py", "line": 3, "reason": "", "lines": None}
    seen = [Event("read", common | {"method": "item", "seconds": 0.001}) for _ in range(2)]
    seen.append(Event("compile", common | {"operations": 7, "seconds": 1.0, "reason": "it is <new>"}))
    rows = notebook.summarize(seen)
    assert [row[0] for row in rows] == ["compile, 7 operators: it is <new>", "read .item()"]
    assert rows[1][2] == 2
    assert "<b>" not in notebook.as_html(rows)
    assert "<new>" not in notebook.as_html(rows)
