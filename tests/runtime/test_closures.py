"""Functions that run after the step, with its values: at its end, or without stalling it."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import tarry
from tarry.events import expect

USES_DEVICE = True


def test_a_closure_runs_after_the_step_with_host_copies() -> None:
    seen = []
    x = torch.ones(3, device="tarry") + 1
    with expect(syncs=0):
        tarry.add_step_closure(lambda t: seen.append((t.device.type, t.tolist())), x)
    x.add_(5)  # the closure keeps the value of its moment
    tarry.mark_step()
    tarry.wait()
    assert seen == [("cpu", [2.0, 2.0, 2.0])]
    tarry.mark_step()
    tarry.wait()
    assert len(seen) == 1


def test_a_closure_has_run_when_the_step_ends() -> None:
    seen: list[tuple[float, bool]] = []
    main = threading.get_ident()
    model = torch.nn.Linear(2, 1).to("tarry")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ends = (tarry.mark_step, optimizer.step, tarry.sync, torch.tarry.synchronize)
    for k, end in enumerate(ends):
        model(torch.ones(3, 2, device="tarry")).sum().backward()
        value = torch.full((), float(k), device="tarry")
        tarry.add_step_closure(lambda t: seen.append((t.item(), threading.get_ident() == main)), value)
        end()
        assert seen[-1] == (k, True)
    tarry.add_step_closure(lambda: seen.append((9.0, True)))
    tarry.mark_step()  # nothing is pending
    assert len(seen) == len(ends) + 1


def test_what_a_closure_raises_comes_out_of_mark_step_once() -> None:
    seen: list[float] = []

    def fail(_: torch.Tensor) -> None:
        raise ValueError("no such logger")

    x = torch.ones((), device="tarry") + 1
    tarry.add_step_closure(fail, x)
    tarry.add_step_closure(lambda t: seen.append(t.item()), x)
    with pytest.raises(ValueError, match="no such logger"):
        tarry.mark_step()
    assert seen == [2.0]  # the others have run
    tarry.mark_step()
    tarry.wait()
    assert (x + 1).item() == 3.0


def test_a_closure_may_record_and_end_a_step() -> None:
    seen: list[float] = []

    def again(value: torch.Tensor) -> None:
        tarry.add_step_closure(lambda t: seen.append(t.item()), value.to("tarry") + 1)
        tarry.mark_step()
        seen.append(value.item())

    tarry.add_step_closure(again, torch.ones((), device="tarry"))
    tarry.mark_step()
    assert seen == [2.0, 1.0]


def test_the_step_does_not_wait_for_an_asynchronous_closure() -> None:
    gate, done = threading.Event(), threading.Event()
    x = torch.ones(1, device="tarry") + 1

    def slow(_: torch.Tensor) -> None:
        gate.wait(10)
        done.set()

    tarry.add_step_closure(slow, x, run_async=True)
    tarry.mark_step()
    assert not done.is_set()
    assert (x + 1).item() == 3.0  # steps go on while the closure waits
    gate.set()
    tarry.wait()
    assert done.is_set()


def test_closures_run_in_order() -> None:
    seen = []
    for k in range(5):
        value = torch.full((), float(k), device="tarry")
        tarry.add_step_closure(lambda t: seen.append(t.item()), value, run_async=True)
    tarry.mark_step()
    tarry.wait()
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_an_error_in_an_asynchronous_closure_is_raised_once_by_wait() -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("no such logger")

    tarry.add_step_closure(fail, torch.ones((), device="tarry"), run_async=True)
    tarry.mark_step()
    with pytest.raises(ValueError, match="no such logger"):
        tarry.wait()
    tarry.wait()


def test_a_failed_step_runs_the_closures_whose_values_are_there() -> None:
    seen: list[list[float]] = []
    good = torch.ones(2, device="tarry") * 3
    bad = torch.ones(2).to("tarry")[torch.tensor([7]).to("tarry")]
    tarry.add_step_closure(lambda t: seen.append(t.tolist()), good)
    tarry.add_step_closure(lambda t: seen.append(t.tolist()), bad)
    with pytest.raises(IndexError):
        tarry.sync()
    tarry.wait()  # nothing that was raised already
    assert seen == [[3.0, 3.0]]
    tarry.add_step_closure(lambda t: seen.append(t.tolist()), good + 1)
    tarry.mark_step()
    tarry.wait()
    assert seen == [[3.0, 3.0], [4.0, 4.0]]


def test_closures_of_an_interrupted_step_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    tarry.add_step_closure(lambda t: seen.append(t.item()), torch.ones((), device="tarry") + 1)

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tarry.mark_step()
    assert seen == []
    tarry.mark_step()
    tarry.wait()
    assert seen == [2.0]
