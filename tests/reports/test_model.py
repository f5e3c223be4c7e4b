"""What is found out about a run from its file: steps, costs by line, the verdict, comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tarry.reports.compare import figures, mode, names, places, verdict_of_two
from tarry.reports.compare import graphs as graphs_of
from tarry.reports.reading import EventsFileError, Run, read
from tarry.reports.steps import CATEGORIES, MAX_STEPS, timeline
from tarry.reports.terminal import judge, summary
from tests.reports.lines import end, event, graph, header, sync, write


def _run(tmp_path: Path, *lines: dict[str, Any], **changes: Any) -> Run:
    return read(write(tmp_path / "events.json", lines, **changes))


def test_a_step_ends_with_the_optimizer(tmp_path: Path) -> None:
    made = timeline(_run(tmp_path, sync(1.0, 0.4, reason="item"), sync(2.0, 0.4), sync(3.0, 0.4)))
    assert [(step.syncs, round(step.seconds, 3)) for step in made.steps] == [(2, 1.4), (1, 1.0)]


def test_without_an_optimizer_each_sync_is_a_step(tmp_path: Path) -> None:
    made = timeline(_run(tmp_path, sync(1.0, 0.4, reason="item"), sync(2.0, 0.4, reason="print")))
    assert len(made.steps) == 2


def test_spans_say_what_was_done_when(tmp_path: Path) -> None:
    made = timeline(
        _run(
            tmp_path,
            event("compile", 0.5, seconds=0.5, reason="another shape"),
            sync(1.0, 0.4, "reference", seconds=0.3, wait_seconds=0.1, start=0.5),
            event("read", 1.2, seconds=0.3, method="item", file="a.py", line=3),
            event("fallback", 1.3, seconds=0.1, op="aten::nonzero"),
        )
    )
    found = [(CATEGORIES[s.category], round(s.start, 3), round(s.seconds, 3)) for s in sorted(made.spans)]
    assert found == [
        ("compile", 0.0, 0.5),
        ("record", 0.5, 0.2),
        ("wait", 0.7, 0.1),
        ("reference", 0.8, 0.2),
        ("read", 0.9, 0.3),
        ("fallback", 1.2, 0.1),
    ]


def test_a_long_run_keeps_its_ends(tmp_path: Path) -> None:
    made = timeline(_run(tmp_path, *(sync(1.0 + k, 0.4) for k in range(MAX_STEPS + 10))))
    assert len(made.steps) == MAX_STEPS + 10
    assert made.left_out == 10
    assert {span.step for span in made.spans} >= {0, MAX_STEPS + 9}


def test_costs_are_added_up_by_line_dearest_first(tmp_path: Path) -> None:
    here, there = {"file": "a.py", "line": 3}, {"file": "b.py", "line": 4, "library": "lib.py:7"}
    reads = [event("read", k, seconds=0.1, method="item", **here) for k in range(3)]
    found = judge(
        _run(tmp_path, *reads, event("fallback", 9.0, seconds=2.0, op="aten::nonzero", reason="data", **there))
    )
    assert [(c.group, c.place, c.count, round(c.seconds, 3)) for c in found.costs] == [
        ("fallbacks", "b.py:4", 1, 2.0),
        ("reads", "a.py:3", 3, 0.3),
    ]
    assert found.costs[0].library == "lib.py:7"
    assert found.costs[1].remedy == "read less"  # the usual one, from the head of the file


def test_compiles_in_the_background_are_not_waited_for(tmp_path: Path) -> None:
    compiles = [event("compile", 5.0, seconds=4.0, background=True), event("compile", 6.0, seconds=1.0)]
    found = judge(_run(tmp_path, *compiles, end(10.0))).verdict
    assert (found.lost["compiles"], found.background) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ([], "empty"),
        ([sync(k, 0.5, "reference") for k in range(1, 11)], "cold"),
        ([sync(k, 0.5, "reference") for k in range(1, 3)] + [sync(k, 0.5) for k in range(3, 11)], "warm"),
        ([sync(k, 0.5, "native") for k in range(1, 11)], "warm"),
        ([sync(k, 0.5) for k in range(1, 10)] + [event("compile", 9.5, operations=10), sync(10, 0.5)], "cold"),
        ([sync(k, 0.5, "reference") for k in range(1, 11)] + [end(11.0, backend="eager")], "reference"),
    ],
)
def test_a_run_is_warm_when_programs_serve_it_and_nothing_is_compiled(
    tmp_path: Path, lines: list[dict[str, Any]], state: str
) -> None:
    assert judge(_run(tmp_path, *lines)).verdict.state == state


def test_advice_is_about_what_cost_most_and_names_the_line(tmp_path: Path) -> None:
    reads = [event("read", k, seconds=0.3, method="item", file="a.py", line=3) for k in range(1, 10)]
    again = event("compile", 10.0, seconds=6.0, reason="input f32[7] is f32[8] now", file="b.py", line=4, again=True)
    cheap = event("fallback", 10.5, seconds=1e-6, op="aten::nonzero", file="c.py", line=5)
    found = judge(_run(tmp_path, *reads, again, cheap, end(12.0))).verdict
    assert [advice.place for advice in found.advice] == ["b.py:4", "a.py:3"]
    assert "f32[8]" in found.advice[0].title
    assert found.advice[1].remedy == "read less"


def test_notes_say_what_is_missing(tmp_path: Path) -> None:
    killed = judge(_run(tmp_path, sync(1.0, 0.5), before={"sync": 7})).verdict.notes
    assert any("began late" in note for note in killed)
    assert any("no end" in note for note in killed)
    assert judge(_run(tmp_path, sync(1.0, 0.5), end(2.0))).verdict.notes == []


def test_two_runs_are_compared(tmp_path: Path) -> None:
    read_ = {"method": "item", "file": "a.py", "line": 3}
    slow = [sync(k, 0.5) for k in range(1, 9)] + [event("read", 9.0, seconds=3.0, **read_), graph("aa"), end(9.0)]
    fast = [sync(k / 2, 0.2) for k in range(1, 9)] + [event("read", 5.0, seconds=1.0, **read_), graph("bb"), end(5.0)]
    runs = [read(write(tmp_path / name, lines)) for name, lines in (("a.json", slow), ("b.json", fast))]
    judged = [judge(run) for run in runs]
    assert mode(runs) == "compare"
    assert "2 times faster" in verdict_of_two(judged)
    assert places(judged)[0]["seconds"] == [3.0, 1.0]
    assert {row["what"]: row["values"] for row in figures(judged)}["steps"] == [8.0, 8.0]
    assert [row["seconds"] for row in graphs_of(runs)] == [[0.25, None], [None, 0.25]]
    assert "2 times faster" in summary(runs)


def test_ranks_are_shown_side_by_side(tmp_path: Path) -> None:
    runs = [read(write(tmp_path / f"{k}.json", [sync(1.0, 0.5)], rank=k, world_size=3)) for k in range(3)]
    assert mode(runs) == "ranks"
    assert names(runs) == ["rank 0", "rank 1", "rank 2"]


def test_runs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    runs = [read(write(tmp_path / f"{k}.json", [])) for k in range(3)]
    with pytest.raises(EventsFileError, match="same rank"):
        mode(runs)


# ---- files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("<!doctype html>", "is a page: give the file of events beside it"),
        ('{"kind": "sync"}\n', "first line is no header"),
        ("\x00\xff not text", "first line is no header"),
        ("[1, 2]\n", "first line is no header"),
        ('{"tarry_events": 99, "tarry": "7.0"}\n', "version 99 .* made by tarry 7.0"),
        ('{"tarry_events": 1}\n', "damaged header: there is no 'tarry'"),
    ],
)
def test_a_file_that_is_none_of_events_is_refused_with_a_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(EventsFileError, match=message):
        read(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EventsFileError, match="nowhere"):
        read(tmp_path / "nowhere.json")


def test_half_a_line_at_the_end_is_no_damage_and_others_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", [sync(1.0, 0.5)])
    whole = path.read_text()
    path.write_text(whole + '{"kind": "sync", "t": 2.0, "thr')
    assert (len(read(path).events), read(path).skipped) == (1, 0)
    damaged = ["nonsense", '{"kind": "read", "t": "late", "thread": 0}']
    damaged.append('{"kind": "read", "t": 1, "thread": 0, "seconds": "x"}')
    path.write_text(whole + "\n".join(damaged) + "\n")
    run = read(path)
    assert (len(run.events), run.skipped) == (1, 3)
    assert any("3 lines" in note for note in judge(run).verdict.notes)


def test_lines_of_a_later_version_are_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", [event("something new", 1.0, colour="green"), sync(2.0, 0.5)], colour="green")
    assert len(judge(read(path)).timeline.steps) == 1


def test_every_prefix_of_a_file_can_be_read(tmp_path: Path) -> None:
    """A process may be killed at any moment."""
    path = write(tmp_path / "x.json", [sync(1.0, 0.5), graph("aa"), sync(2.0, 0.5), end(3.0)])
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for length in range(first, len(data), 7):
        path.write_bytes(data[:length])
        judge(read(path))


def test_header_is_what_the_format_says() -> None:
    from tarry.reports.format import problems

    assert list(problems(header(), header=True)) == []
    assert list(problems(header(rank="0"), header=True)) == ["'rank' is str"]
