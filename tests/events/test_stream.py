"""Subscribing: live or later, with errors, on threads; and what a natively served step leaves in the log."""

from __future__ import annotations

import linecache
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tarry
from tarry import places
from tarry.events import DEFAULTS, Event, flush, record, subscribe

USES_DEVICE = True


def _loop(count: int) -> None:
    x = torch.ones(4).to("tarry")
    for _ in range(count):
        (x + 1).sum().item()  # here


@pytest.fixture(autouse=True)
def _natively() -> None:
    tarry.set_backend("torchscript", compile="background")


def test_later_subscribers_leave_steps_to_the_native_part() -> None:
    seen: list[Event] = []
    before = tarry.metrics.counters().get("sync", 0)
    with subscribe(seen.append, live=False):
        _loop(5)
        assert not seen
        flush()
        kinds = [event.kind for event in seen]
        assert (kinds.count("sync"), kinds.count("read")) == (5, 5)
        _loop(2)
    assert len(seen) == 14
    assert tarry.metrics.counters()["sync"] - before == 7  # each is counted once
    times = [event.time for event in seen]
    assert times == sorted(times)
    for event in seen:
        assert event.fields.keys() == DEFAULTS[event.kind].keys()
        assert event.fields["file"] == __file__
        assert "# here" in linecache.getline(__file__, event.fields["line"])
    sync = next(event.fields for event in seen if event.kind == "sync")
    assert (sync["path"], sync["operations"], sync["reason"]) == ("reference", 2, "item")
    assert sync["seconds"] >= sync["execute_seconds"] > 0
    assert sync["start"] + sync["record_seconds"] <= seen[0].time


def test_both_kinds_of_subscribers_see_the_same() -> None:
    later: list[Event] = []
    with subscribe(later.append, live=False), record() as live:
        _loop(3)
    assert [(event.kind, event.fields) for event in later] == [(event.kind, event.fields) for event in live]
    assert [event.kind for event in live].count("read") == 3


def test_many_events_are_delivered_before_they_are_overwritten() -> None:
    seen: list[Event] = []
    with subscribe(seen.append, live=False):
        _loop(6000)
    assert sum(event.kind == "read" for event in seen) == 6000


def _fails() -> None:
    _loop(1)
    raise ZeroDivisionError


def test_a_subscriber_that_raises_stops_no_program() -> None:
    others: list[Event] = []

    def raises(event: Event) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), subscribe(others.append), subscribe(raises):
        _loop(2)
    assert sum(event.kind == "read" for event in others) == 2
    with pytest.raises(ZeroDivisionError), subscribe(raises):  # the program's own error is the one that is raised
        _fails()


def test_a_subscriber_that_subscribes_and_emits() -> None:
    inner: list[Event] = []

    def nested(event: Event) -> None:
        if event.kind == "read":
            with subscribe(inner.append):
                tarry.events.emit("replay", function="f")

    with subscribe(nested):
        _loop(2)
    assert [event.kind for event in inner] == ["replay"] * 2


def test_threads_have_their_own_lines() -> None:
    def work() -> None:
        y = torch.ones(2).to("tarry") + 1
        y.sum().item()  # there

    with record() as seen:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    reads = [event.fields for event in seen if event.kind == "read"]
    assert len(reads) == 4
    assert all("# there" in linecache.getline(fields["file"], fields["line"]) for fields in reads)


def _generator(x: torch.Tensor) -> Any:
    yield (x + 1).sum().item()


async def _coroutine(x: torch.Tensor) -> float:
    return (x + 1).sum().item()


def test_generators_coroutines_and_code_of_exec() -> None:
    x = torch.ones(2).to("tarry")
    with record() as seen:
        next(_generator(x))
        with pytest.raises(StopIteration):
            _coroutine(x).send(None)
        exec(compile("\n\n(x + 1).sum().item()", "<my cell>", "exec"), {"x": x})
    reads = [(event.fields["file"], event.fields["line"]) for event in seen if event.kind == "read"]
    assert [file for file, _ in reads] == [__file__, __file__, "<my cell>"]
    assert reads[2][1] == 3
    assert "yield" in linecache.getline(*reads[0])
    assert "return" in linecache.getline(*reads[1])


def test_whose_a_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torchs = str(Path(torch.__file__).parent / "nn" / "functional.py")
    assert places.judge(torchs) == places.INTERNAL
    assert places.judge(places.__file__) == places.INTERNAL
    assert places.judge(linecache.__file__) == places.INTERNAL
    assert places.judge("/x/lib/python3.11/site-packages/transformers/model.py") == places.LIBRARYS
    for users in ("/home/me/torch/train.py", "<stdin>", "/home/tarry/train.py", f"{places._EXAMPLES}train_gpt.py"):
        assert places.judge(users) == places.USERS
    script = str(tmp_path / "site-packages" / "train.py")
    monkeypatch.setattr("sys.modules", {"__main__": type("Main", (), {"__file__": script, "__spec__": None})})
    assert places.judge.__wrapped__(script) == places.USERS
