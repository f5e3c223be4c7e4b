"""Streams and events: what PyTorch's reference device (OpenReg) shows of them, and what they mean on a lazy device."""

from __future__ import annotations

import threading

import pytest
import torch

import tarry
from tarry.events import expect
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


def test_streams_have_ids_of_their_own() -> None:
    streams = [torch.Stream(device="tarry"), torch.tarry.Stream(), torch.tarry.Stream("tarry:0", priority=-1)]
    assert len({s.stream_id for s in streams} | {torch.tarry.default_stream().stream_id}) == 4
    for stream in streams:
        assert isinstance(stream, torch.tarry.Stream)
        assert stream.device == torch.device("tarry:0")
        assert "device_type=tarry" in repr(stream)
        again = torch.Stream(
            stream_id=stream.stream_id, device_type=stream.device_type, device_index=stream.device_index
        )
        assert again == stream
    assert not isinstance(torch.tarry.Event(), torch.tarry.Stream)
    assert torch.tarry.Stream.priority_range() == (0, -1)


def test_the_current_stream_is_the_threads() -> None:
    default, mine = torch.tarry.default_stream(), torch.Stream(device="tarry")
    assert torch.accelerator.current_stream() == torch.tarry.current_stream() == default
    with mine:
        assert torch.accelerator.current_stream() == mine
        other: list[torch.Stream] = []
        thread = threading.Thread(target=lambda: other.append(torch.tarry.current_stream()))
        thread.start()
        thread.join()
        assert other == [default]
        with torch.tarry.stream(None), torch.tarry.stream(torch.tarry.Stream()):
            assert torch.tarry.current_stream() not in (default, mine)
        assert torch.tarry.current_stream() == mine
    assert torch.tarry.current_stream() == default
    torch.accelerator.set_stream(mine)
    assert torch.tarry.current_stream() == mine
    torch.tarry.set_stream(default)


def test_work_on_streams_is_in_the_order_of_the_program() -> None:
    def run(device: str) -> list[float]:
        x = torch.ones(3, device=device, requires_grad=True)
        if device == "cpu":
            y = ((x * 2) + 1) * x
        else:
            first, second = torch.Stream(device=device), torch.Stream(device=device)
            with first:
                y = x * 2
            second.wait_stream(first)
            with second:
                y = y + 1
                y.record_stream(second)
            event = second.record_event()
            first.wait_event(event)
            event.wait(first)
            with first:
                y = y * x
        y.sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert run("tarry") == run("cpu")


def test_a_backward_pass_over_several_streams() -> None:
    x = torch.ones(4, device="tarry", requires_grad=True)
    total = torch.zeros((), device="tarry")
    for k in range(3):
        with torch.tarry.stream(torch.tarry.Stream()):
            total = total + (x * k).sum()
    total.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4


def test_events() -> None:
    event = torch.Event(device="tarry")
    assert isinstance(event, torch.tarry.Event)
    assert event.query()  # never recorded
    assert event.event_id == 0
    event.synchronize()
    stream = torch.Stream(device="tarry")
    event.record(stream)
    first, second = stream.record_event(), stream.record_event()
    assert len({0, event.event_id, first.event_id, second.event_id}) == 4
    before = event.event_id
    event.record()
    assert event.event_id == before
    with pytest.raises(NotImplementedError, match="interprocess"):
        torch.tarry.Event(interprocess=True)


def test_asking_an_event_launches_what_it_stands_for() -> None:
    x = torch.ones(3, device="tarry") + 1
    event = torch.tarry.Event()
    with expect(syncs=0):
        event.record()
    with expect(syncs=1):
        while not event.query():
            pass
    y = x + 1
    with expect(syncs=0):
        assert event.query()  # what came later does not count
    stream = torch.tarry.current_stream()
    with expect(syncs=1):
        while not stream.query():
            pass
    with expect(syncs=0):
        assert y.tolist() == [3.0] * 3


def test_waiting_for_an_event_computes() -> None:
    x = torch.ones(3, device="tarry") + 1
    event = torch.tarry.current_stream().record_event()
    with expect(syncs=1):
        event.synchronize()
        assert event.query()
        assert x.tolist() == [2.0] * 3


def test_elapsed_time_is_of_what_was_computed_between() -> None:
    start, middle, end = (torch.tarry.Event(enable_timing=True) for _ in range(3))
    x = torch.randn(64, 64).to("tarry")
    start.record()
    middle.record()
    for _ in range(20):
        x = x @ x / 64
    with expect(syncs=1):
        end.record()  # computes the products: else they would not be in the time
    with expect(syncs=0):
        x.tolist()
    assert 0 < middle.elapsed_time(end) < start.elapsed_time(end)
    plain = torch.tarry.Event()
    plain.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        plain.elapsed_time(end)


def test_the_error_of_a_step_comes_where_it_is_asked_for() -> None:
    x = torch.ones(2).to("tarry")[torch.tensor([7]).to("tarry")]
    event = torch.tarry.Event()
    event.record()
    with pytest.raises(IndexError):
        event.synchronize()
    event.synchronize()
    assert event.query()
    with pytest.raises(IndexError):
        x.tolist()


def test_two_threads_with_streams_and_events() -> None:
    errors: list[BaseException] = []
    shared = torch.tarry.Event()

    def work(k: int) -> None:
        try:
            with torch.tarry.stream(torch.tarry.Stream()):
                for _ in range(20):
                    x = torch.full((8,), float(k), device="tarry") + 1
                    shared.record()
                    shared.query()
                    assert x.tolist() == [k + 1.0] * 8
                    shared.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_nothing_is_captured() -> None:
    assert not torch.tarry.is_current_stream_capturing()
    if hasattr(torch.accelerator, "Graph"):
        with pytest.raises(RuntimeError, match="not supported"):
            torch.accelerator.Graph()
    tarry.sync()
