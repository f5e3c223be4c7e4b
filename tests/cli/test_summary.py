"""The summary of `tarry run`, from events."""

from __future__ import annotations

import io
import sys

from rich.console import Console

from tarry.cli.compare import Losses, verdict
from tarry.cli.progress import CompileProgress
from tarry.cli.summary import summary
from tarry.cli.watch import Cost, Place, Step, Watch
from tarry.events import Event


def text(watch: Watch) -> str:
    return summary(watch, "train.py", "cuda", "inductor", "cpu").plain


def test_a_step_belongs_to_whoever_computed_most_of_it() -> None:
    watch = Watch()
    watch(Event("sync", {"operations": 3, "path": "reference"}))
    watch(Event("sync", {"operations": 100, "path": "native"}))
    watch.end_step()
    watch(Event("sync", {"operations": 100, "path": "reference"}))
    watch.end_step()
    watch.finish()
    assert [step.compiled for step in watch.steps] == [True, False]


def test_what_it_says() -> None:
    watch = Watch(steps=[Step(5.0, False), *[Step(0.2, False)] * 2, *[Step(0.1, True)] * 6], syncs=9)
    fields = {
        "seconds": 40.0,
        "operations": 412,
        "again": False,
        "reason": "new",
        "file": "/nowhere/a/b/train.py",
        "line": 24,
    }
    watch.compiles.append(fields)
    watch(Event("read", {"method": "item", "seconds": 0.3, "file": "train.py", "line": 31, "library": ""}))
    watch.reads[Place(".item()", "train.py", 31)].count = 9
    watch.fallbacks[Place("aten::nonzero", "train.py", 40)] = Cost(9, 0.2, "/x/lib.py:3", "its result depends on data")
    lines = text(watch).splitlines()
    assert len(lines) <= 10
    said = "\n".join(lines)
    assert "9, 6 of them by programs (67%)" in said
    assert "200 ms a step without a program, 100 ms with one (2.0 times as fast)" in said
    assert "the largest has 412 operators (.../a/b/train.py:24)" in said
    assert "train.py:31  .item(): 9 x 33 ms = 300 ms" in said
    assert "train.py:40  aten::nonzero: 9 x 22 ms = 200 ms, by /x/lib.py:3" in said
    assert "train.py:31: a wait in every step" in said
    assert "aten::nonzero runs by itself, because its result depends on data" in said


def test_progress_is_a_line_in_a_log_and_leaves_stdout_alone() -> None:
    file = io.StringIO()
    progress, stdout = CompileProgress(Console(file=file, width=200)), sys.stdout
    fields = {"operations": 412, "reason": "first time", "lines": ("a.py:1", "/nowhere/a/b/train.py:24")}
    for seconds in (41.0, 0.01):
        progress(Event("compiling", fields))
        progress(Event("compile", {**fields, "seconds": seconds}))
    assert file.getvalue() == "tarry: a step of 412 operators (.../a/b/train.py:24) compiled in 41.0 s: first time\n"
    terminal = CompileProgress(Console(file=file, width=200, force_terminal=True))
    terminal(Event("compiling", fields))
    assert sys.stdout is stdout
    terminal.close()
    assert "tarry compiles a step of 412 operators" in file.getvalue()


def test_no_advice_about_what_costs_nothing() -> None:
    watch = Watch(steps=[Step(1.0, True)] * 9, syncs=9)
    watch.reads[Place(".item()", "train.py", 31)] = Cost(9, 0.001)
    assert "a wait in every step" not in text(watch)


def test_nothing_recorded() -> None:
    assert "--from cpu" in text(Watch())


def test_the_verdict() -> None:
    eager = Losses(2, [1.0, 2.0], [0.1, 0.1])
    assert "the same" in verdict(eager, Losses(2, [1.0, 2.0001], [0.1, 0.1]))
    assert "DIFFER from step 2" in verdict(eager, Losses(2, [1.0, 2.1], [0.1, 0.1]))
    assert "DIFFER from step 1" in verdict(eager, Losses(2, [float("nan"), 2.0], [0.1, 0.1]))
    assert "nothing to compare" in verdict(Losses(2), eager)
