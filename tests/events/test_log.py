"""Events as lines of the logger `tarry`, and as a report by line."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tarry
from tarry.events import log
from tarry.runtime import limits
from tests.runtime.portable import Portable, using
from tests.support import programs_for_small_graphs

USES_DEVICE = True
__all__ = ["programs_for_small_graphs"]


def _background(steps: int = 8) -> None:
    x = torch.ones(2).to("tarry")
    with using(Portable(recipe=False), "background"):
        for _ in range(steps):
            (x + 1).tolist()
            tarry.wait_for_compiles()


def test_by_itself_it_says_when_a_large_step_is_compiled_and_takes_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _background()
    assert not caplog.messages  # a small one is worth no line
    monkeypatch.setattr(log, "LARGE", 1)
    _background()
    first, second = caplog.messages
    assert first.startswith("tarry: compiling a step of 1 operators in the background at tests/events/test_log.py:")
    assert "step of 1 operators (tests/events/test_log.py:" in second
    assert " -> " in second


def test_topics(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tarry")
    x = torch.ones(2).to("tarry")
    with tarry.config.override(log={"fallback", "read"}):
        torch.nonzero(x).tolist()
    assert len(caplog.messages) == 2
    assert "aten::nonzero ran by itself at tests/events/test_log.py:" in caplog.messages[0]
    assert "torch.where" in caplog.messages[0]
    torch.nonzero(x)
    assert len(caplog.messages) == 2


def test_an_unknown_topic_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fallback, .*not fallbacks"):
        tarry.config.log = {"fallbacks"}
    assert tarry.config.log == frozenset()


def test_the_report_is_by_line_and_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2).to("tarry")
    with tarry.events.record():
        for _ in range(3):
            torch.nonzero(x)
        x.sum().item()
    torch.nonzero(x)
    report = tarry.metrics.report()
    assert "aten::nonzero ran by itself: 3 x" in report
    assert "why: its result depends on data" in report
    assert "do: read it every tenth step" in report
    costs = [cost.seconds for _, _, cost in tarry.metrics.places()]
    assert costs == sorted(costs, reverse=True)


SCRIPT = """
import torch
import tarry
x = torch.ones(3, device="tarry")
print((x * 2).sum().item())
"""


def _run(code: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    given = {**os.environ, "PYTHONPATH": str(Path(tarry.__file__).parent.parent), **environment}
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=given, check=False)


@pytest.mark.process
def test_from_the_environment(tmp_path: Path) -> None:
    done = _run(SCRIPT, tmp_path, TARRY_LOG="read, sync")
    assert done.returncode == 0, done.stderr
    assert ".item() at " in done.stderr
    assert "script.py:5" in done.stderr
    refused = _run(SCRIPT, tmp_path, TARRY_LOG="reads")
    assert refused.returncode != 0
    assert "not reads" in refused.stderr


@pytest.mark.process
def test_nothing_recorded_is_said_once(tmp_path: Path) -> None:
    done = _run("import torch, tarry\nprint(torch.ones(2))", tmp_path)
    assert done.stderr.count("nothing was recorded") == 1
    assert "nothing was recorded" not in _run(SCRIPT, tmp_path).stderr


def test_a_takeover_without_a_step_before(caplog: pytest.LogCaptureFixture) -> None:
    assert limits.TAKEOVER_STEPS >= 1
    fields = tarry.events.DEFAULTS["takeover"] | {"operations": 412, "seconds": 41.0, "file": "/train.py", "line": 24}
    from tarry.events.text import line

    assert line("takeover", fields) == "step of 412 operators (/train.py:24) compiled in 41.0 s"
    assert line("takeover", fields | {"before": 0.212, "after": 0.14}).endswith("41.0 s: 212 ms -> 140 ms")
