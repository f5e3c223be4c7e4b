"""The benchmarks' bookkeeping: what is asked, what is met, and the forms in which results are shown."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import cold_start, suite
from benchmarks._plot import svg
from benchmarks._results import Results, Row, Target, Verdict, markdown, row_of
from benchmarks.programs import ALL_PROGRAMS


def row(**values: float) -> Row:
    return Row("training step on cpu", "MLP", "ms", {name.replace("_", " "): value for name, value in values.items()})


def results(*rows: Row) -> Results:
    return Results({"torch": "2.13", "cpu": "a CPU"}, list(rows), ["LTC fails: a reason"])


def test_the_best_subject_is_judged() -> None:
    judged = row(compile=2.0, tarry_inductor=1.9, tarry_eager=3.0).judge(
        [Target(("tarry inductor", "tarry eager"), "compile", 0.9), Target(("tarry eager",), "compile", 2.0)]
    )
    (first, second) = judged.verdicts
    assert (first.subject, first.found, first.met) == ("tarry inductor", pytest.approx(0.95), False)
    assert (second.subject, second.met) == ("tarry eager", True)
    assert "NOT MET" in str(first)


def test_a_difference_is_judged_as_one() -> None:
    (verdict,) = row(eager=0.1, tarry=1.05).judge([Target(("tarry",), "eager", 1.0, difference=True)]).verdicts
    assert verdict.found == pytest.approx(0.95)
    assert verdict.met


def test_what_was_not_measured_is_not_judged() -> None:
    targets = [Target(("tarry",), "compile", 1.0)]
    assert row(tarry=1.0).judge(targets).verdicts == []
    assert row(compile=1.0).judge(targets).verdicts == []


def test_rows_have_medians_and_spreads_and_leave_out_who_failed() -> None:
    made = row_of("s", "w", "ms", {"eager": [1.0, 2.0, 3.0, 4.0, 5.0], "tarry": [7.0], "LTC": []})
    assert made.values == {"eager": 3.0, "tarry": 7.0}
    assert made.spread == {"eager": pytest.approx(1.5)}


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    given = results(row(eager=2.0, tarry=1.0).judge([Target(("tarry",), "eager", 0.9)]))
    given.write(tmp_path / "r.json")
    assert Results.read(tmp_path / "r.json") == given


def test_markdown_has_a_table_for_each_section() -> None:
    text = markdown(results(row(eager=2.0, tarry=1.0).judge([Target(("tarry",), "eager", 0.4)])))
    assert "### training step on cpu" in text
    assert "| MLP, ms | 2.00 | 1.00 | tarry / eager: 0.50, asked 0.4: **not met** |" in text
    assert "- LTC fails: a reason" in text


def test_the_plot_is_well_formed_and_has_a_bar_for_each_peer() -> None:
    tree = ElementTree.fromstring(svg([row(eager=2.0, tarry=1.0, LTC=40.0)]))
    bars = [r for r in tree.iter("{http://www.w3.org/2000/svg}rect") if r.get("x")]
    assert [bar.get("width") for bar in bars] == ["225", "112", "450"]
    words = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "20.00" in words, "a bar that is cut keeps its number"


def test_render_fills_the_place_for_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results(row(eager=2.0, tarry=1.0)).write(tmp_path / "r.json")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{suite.BEGIN}\nold\n{suite.END}\nafter\n")
    assert suite.render([str(tmp_path / "r.json"), "--into", str(page), "--plot", str(tmp_path / "p.svg")]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{suite.BEGIN}\nMeasured with")
    assert text.endswith(f"{suite.END}\nafter\n")
    assert "old" not in text
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    page.write_text("no place")
    assert suite.render([str(tmp_path / "r.json"), "--into", str(page)]) == 1
    assert "has no lines" in capsys.readouterr().err


def test_targets_are_of_rows_and_peers_that_exist() -> None:
    plan = suite.Plan(("cpu", "cuda"), (), rounds=1, quick=False)
    assert {*plan.threads("cpu"), *plan.threads("cuda")} == set(suite.TRAINING_TARGETS)
    for case, rows in suite.TRAINING_TARGETS.items():
        peers = set(suite.PEERS["cuda" if case == "cuda" else "cpu"])
        for name, targets in rows.items():
            assert name in ALL_PROGRAMS
            for target in targets:
                assert {*target.subjects, target.reference} <= peers


def test_the_steady_state_is_found_behind_the_last_slow_step() -> None:
    slow, fast = [1.0, 5.0, 0.2], [0.01] * 30
    ends = list(itertools.accumulate([*slow, *fast]))
    usual, since = cold_start.ready(ends)
    assert usual == pytest.approx(0.01)
    assert since == pytest.approx(6.2)
    assert cold_start.ready(list(itertools.accumulate(fast)))[1] == 0.0


def test_a_ratio_that_prints_as_asked_is_met() -> None:
    assert Verdict("tarry", "eager", 0.9, 0.904, difference=False).met
    assert not Verdict("tarry", "eager", 0.9, 0.906, difference=False).met
