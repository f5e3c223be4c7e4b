"""The survey goes on where it was stopped, in parts, and reports all of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.ops.survey import Record, _shard, main
from tests.support.pool import Outcome


def test_a_line_that_was_cut_off_is_not_an_outcome(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    Record(str(path)).add(Outcome("add", {"modes": {}}, None, 1.0))
    with path.open("a") as file:
        file.write('{"task": "mul", "val')
    assert Record(str(path)).outcomes == [Outcome("add", {"modes": {}}, None, 1.0)]


def test_shards() -> None:
    assert _shard("2/8") == (1, 8)
    for wrong in ("0/8", "9/8", "2", "2/0"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a shard"):
            _shard(wrong)


@pytest.mark.slow
def test_shards_are_merged_and_nothing_runs_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> tuple[int, str]:
        status = main(["--device", "cpu", "--ops", "^(exp|neg|sin)$", "--samples", "1", "--jobs", "1", *more])
        return status, capsys.readouterr().out

    one, two = str(tmp_path / "1"), str(tmp_path / "2")
    assert run("--shard", "1/2", "--json", one)[0] == 0
    status, text = run("--merge", one)
    assert status == 1
    assert "not reached: 1 operators" in text
    assert run("--shard", "2/2", "--json", two)[0] == 0
    status, text = run("--merge", one, two)
    assert status == 0
    assert "forward   3/3 operators (3 samples)" in text
    before = Path(one).read_text()
    run("--shard", "1/2", "--json", one)
    assert Path(one).read_text() == before
