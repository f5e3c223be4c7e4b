"""The whole benchmark, with peers that need no compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import first_step, suite
from benchmarks._results import Results

pytestmark = pytest.mark.slow  # a process for each peer and section


def test_every_section_runs_and_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(suite.PEERS, "cpu", ("eager", "tarry torchscript", "tarry nonsense"))
    monkeypatch.setattr(first_step, "PEERS", ("eager", "tarry eager"))
    path = tmp_path / "results.json"
    plan = suite.Plan(("cpu",), ("training", "first-step"), rounds=2, quick=True)
    results = suite.run(plan, path)
    assert Results.read(path) == results
    sections = results.sections()
    (row,) = sections["training step on cpu, one thread"]
    assert set(row.values) == {"eager", "tarry torchscript"}
    assert any("tarry nonsense fails" in note and "there is no backend 'nonsense'" in note for note in results.notes)
    cold, again = sections["first step on cpu"]
    assert set(cold.values) == set(again.values) == {"eager", "tarry eager"}
    assert "WRONG" not in capsys.readouterr().out
