"""The recorder: what it writes, when, and that a program never suffers from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tarry import events
from tarry.events import FIELDS, KINDS, Event
from tarry.events.kinds import COMMON
from tarry.reports import recorder as module
from tarry.reports.format import problems
from tarry.reports.reading import read
from tarry.reports.recorder import LEFT_OUT, Recorder, encode
from tests.reports.lines import HOSTILE, header

END = {"counters": {}, "backend": "", "device": ""}


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path / "events.json", header())
    yield made
    made.close(END)


def _lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _value(name: str) -> Any:
    """Another one than the default."""
    special = {"key": (-1, 2), "lines": ("a.py:1", "b.py:2")}
    return (
        special[name] if name in special else {str: HOSTILE, int: 7, float: 0.5, bool: True}[type(FIELDS[name].default)]
    )


def test_every_kind_of_event_is_a_line_that_the_format_describes(recorder: Recorder) -> None:
    for kind in KINDS.values():
        recorder(Event(kind.name, {name: _value(name) for name in COMMON + kind.fields}))
    recorder.close(END)
    first, *lines = _lines(recorder.path)
    assert list(problems(first, header=True)) == []
    assert [list(problems(line)) for line in lines] == [[]] * len(lines)
    kept = [kind for kind in KINDS if kind not in LEFT_OUT]
    assert {line["kind"] for line in lines} == {*kept, "thread", "remedies", "end"}
    assert [event["kind"] for event in read(recorder.path).events] == kept


def test_fields_with_their_defaults_are_left_out(recorder: Recorder) -> None:
    with events.subscribe(recorder):
        events.emit("read", method="item", seconds=0.25)
    recorder.close(END)
    (line,) = read(recorder.path).events
    assert line.keys() == {"kind", "t", "thread", "method", "seconds"}
    assert read(recorder.path).remedies["read"] == KINDS["read"].remedy


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), object(), {1: {2: b"x"}}, (1, (2,)), HOSTILE, "\ud800", 10**400]
)
def test_whatever_an_event_carries_becomes_json(value: Any) -> None:
    text = encode({"kind": "error", "error": value})
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert text.isascii()
    assert "\n" not in text


def test_what_refers_to_itself_becomes_text() -> None:
    value: list[Any] = []
    value.append(value)
    assert json.loads(encode({"kind": "error", "error": value}))


def test_events_are_on_disk_a_moment_later(recorder: Recorder) -> None:
    recorder(Event("transfer", {}))
    deadline = time.monotonic() + 30
    while not read(recorder.path).events and time.monotonic() < deadline:
        time.sleep(0.01)
    assert read(recorder.path).events


KILLED = """
import os, signal, sys, time
from tarry_command import defer_package
defer_package()
from tarry.events import Event
from tarry.reports.recorder import Recorder
from tests.reports.lines import header

recorder = Recorder(sys.argv[1], header())
for k in range(1000):
    recorder(Event("read", {"method": "item", "seconds": 0.5, "line": k}))
time.sleep(5 * 0.2)
for k in range(50_000):
    recorder(Event("read", {"method": "item", "seconds": 0.5, "line": k}))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_a_killed_process_leaves_a_file_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    code = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], check=False, cwd=Path(__file__).parents[2]
    ).returncode
    assert code == -signal.SIGKILL
    run = read(path)
    assert len(run.events) >= 1000
    assert run.end is None
    assert run.skipped == 0


def test_memory_is_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 100)
    longest = 0
    for _ in range(5_000):
        recorder(Event("transfer", {}))
        longest = max(longest, len(recorder._queue))
    assert longest <= 101
    recorder.close(END)
    assert len(read(recorder.path).events) == 5_000


def test_events_of_each_step_are_capped_and_counted(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROUTINE", 10)
    for _ in range(30):
        recorder(Event("transfer", {}))
    recorder(Event("store_miss", {}))
    recorder.close(END)
    run = read(recorder.path)
    assert [event["kind"] for event in run.events] == ["transfer"] * 10 + ["store_miss"]
    assert run.end is not None
    assert run.end["dropped"] == 20


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_ends_the_recording_and_not_the_program(caplog: pytest.LogCaptureFixture) -> None:
    made = Recorder("/dev/full", header())
    for _ in range(10):
        made(Event("transfer", {}))
    made.flush()
    made.close(END)
    assert not made.active
    assert [record.message for record in caplog.records if "Nothing more is recorded" in record.message]


def test_a_forked_child_writes_nothing(recorder: Recorder) -> None:
    recorder(Event("transfer", {}))
    recorder.flush()
    size = os.stat(recorder.path).st_size
    child = os.fork()
    if child == 0:
        recorder(Event("transfer", {}))
        recorder.flush()
        recorder.close(END)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.stat(recorder.path).st_size == size


def test_threads_of_one_name_are_one(recorder: Recorder) -> None:
    for _ in range(3):
        thread = threading.Thread(target=lambda: recorder(Event("transfer", {})), name="mine")
        thread.start()
        thread.join()
    recorder.close(END)
    run = read(recorder.path)
    assert list(run.threads.values()) == ["MainThread", "mine"]
    assert {event["thread"] for event in run.events} == {1}


def test_many_threads_lose_nothing(recorder: Recorder) -> None:
    def emit() -> None:
        for _ in range(2_000):
            recorder(Event("transfer", {}))

    threads = [threading.Thread(target=emit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close(END)
    run = read(recorder.path)
    assert (len(run.events), run.skipped) == (16_000, 0)


def test_what_makes_lines_may_fail(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    def failing() -> Iterator[dict[str, Any] | None]:
        yield None
        raise RuntimeError("this graph cannot be shown")

    recorder.add(failing)
    recorder.add(lambda: iter([{"kind": "program", "graph": "x", "text": "y"}]))
    recorder.close(END)
    assert _lines(recorder.path)[-2]["kind"] == "program"
    assert "could not be written down" in caplog.text
