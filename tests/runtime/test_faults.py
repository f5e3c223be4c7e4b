"""Errors while compiling and executing: the user's line is named, and every tensor that was valid stays valid."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tarry
from tarry.backends.base import Backend, Run
from tarry.errors import BackendError
from tarry.events import expect
from tarry.ir.graph import Graph

USES_DEVICE = True


def _bad_lookup() -> torch.Tensor:
    table = torch.ones(3, 2, device="tarry")
    return F.embedding(torch.tensor([7], device="tarry"), table)


def test_an_error_in_execution_names_the_line_and_keeps_its_type() -> None:
    _bad = _bad_lookup()
    with pytest.raises(IndexError, match=r"aten::embedding, recorded at .*test_faults\.py:\d+"):
        tarry.mark_step()


def test_what_does_not_depend_on_the_failure_is_computed() -> None:
    before, bad, after = torch.ones(2, device="tarry") + 1, _bad_lookup(), torch.ones(2, device="tarry") * 3
    dependent = bad.sum() + 1
    with pytest.raises(IndexError):
        tarry.mark_step()
    with expect(syncs=0):
        assert before.tolist() == [2.0, 2.0]
        assert after.tolist() == [3.0, 3.0]
    for lost in (bad, dependent):
        with pytest.raises(IndexError, match="embedding"):
            lost.cpu()
    tarry.mark_step()  # the error was reported; the program goes on


def test_writes_that_depend_on_the_failure_are_undone() -> None:
    parameter = torch.ones(2, device="tarry")
    parameter.add_(1)
    parameter.mul_(_bad_lookup().sum())
    with pytest.raises(IndexError):
        tarry.mark_step()
    assert parameter.tolist() == [2.0, 2.0]


def test_a_failed_training_step_leaves_the_model_as_it_was() -> None:
    net = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 1)).to("tarry")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(ids: list[list[int]]) -> None:
        loss = net(torch.tensor(ids, device="tarry")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step([[0, 1], [2, 3]])
    before = {name: value.cpu() for name, value in net.state_dict().items()}
    with pytest.raises(IndexError, match="index out of range"):
        step([[0, 9], [1, 2]])
    optimizer.zero_grad()
    for name, value in net.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name
    step([[0, 1], [2, 3]])
    assert all(torch.isfinite(value).all() for value in net.state_dict().values())


def test_out_of_memory_is_an_error_and_nothing_more() -> None:
    kept = torch.ones(2, device="tarry") + 1
    huge = torch.ones(1 << 45, device="tarry")
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory[\s\S]*test_faults\.py:\d+"):
        huge.sum().item()
    del huge
    assert kept.tolist() == [2.0, 2.0]
    assert (kept + 1).tolist() == [3.0, 3.0]


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """A process that a shell started in the background ignores interrupts; here they must arrive."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_in_the_middle_leaves_everything_pending() -> None:
    torch.manual_seed(0)
    weight = torch.randn(500, 500)
    x = weight.to("tarry")
    expected, count = weight.clone(), torch.zeros((), device="tarry")
    for _ in range(400):
        x = (x @ weight.to("tarry")).tanh()
        count.add_(1)
        expected = (expected @ weight).tanh()
    timer = threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            tarry.mark_step()
    finally:
        timer.cancel()  # an interrupt that comes later would end the whole session
    assert count.item() == 400.0
    torch.testing.assert_close(x.cpu(), expected)


class Faulty(Backend):
    """Does one thing wrong."""

    name = "faulty"

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def compile(self, graph: Graph) -> Run:
        if self.fault == "compile":
            raise RuntimeError("this compiler gives up")
        if self.fault == "no function":
            return 3  # type: ignore[return-value]

        def run(inputs: list[Any], numbers: list[Any]) -> list[Any]:
            results: list[Any] = [torch.zeros(value.type.sizes, dtype=value.type.dtype) for value in graph.outputs]
            if self.fault == "run":
                raise RuntimeError("this program breaks off")
            if self.fault == "number":
                return results[:-1]
            if self.fault == "dtype":
                return [r.double() for r in results]
            return [None for r in results] if self.fault == "no tensor" else [r[..., None] for r in results]

        return run


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("compile", r"'faulty' failed to compile [\s\S]*test_faults.py:\d+[\s\S]*gives up"),
        ("no function", "'faulty': compile.graph. gave 3, which cannot be called"),
        ("run", r"'faulty' failed to run [\s\S]*test_faults.py:\d+[\s\S]*breaks off"),
        ("number", r"'faulty'[\s\S]* it gave 0 results for 1 outputs"),
        ("shape", r"'faulty'[\s\S]*\(3, 1\), but[\s\S]*\(3,\) was recorded, by [\s\S]*add[\s\S]*test_faults.py:\d+"),
        ("dtype", r"'faulty'[\s\S]*float64 of shape[\s\S]*float32[\s\S]*aten::add"),
        ("no tensor", r"'faulty'[\s\S]*NoneType, not a tensor, by [\s\S]*aten::add"),
    ],
)
def test_a_faulty_backend_loses_nothing(fault: str, message: str) -> None:
    x = torch.arange(3.0, device="tarry")
    tarry.mark_step()
    tarry.set_backend(Faulty(fault))
    try:
        y = x + 1
        with pytest.raises(BackendError, match=message):
            y.cpu()
    finally:
        tarry.set_backend("eager")
    assert y.tolist() == [1.0, 2.0, 3.0]
    assert x.tolist() == [0.0, 1.0, 2.0]


def test_an_error_of_the_program_is_not_blamed_on_the_backend() -> None:
    tarry.set_backend(Faulty("run"))
    try:
        good, _bad = torch.ones(2, device="tarry") + 1, _bad_lookup()
        with pytest.raises(IndexError, match=r"aten::embedding, recorded at .*test_faults\.py:\d+"):
            tarry.mark_step()
        assert good.tolist() == [2.0, 2.0]
    finally:
        tarry.set_backend("eager")
