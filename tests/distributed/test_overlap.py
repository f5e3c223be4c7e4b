"""Collectives go on while the step computes something else, and whatever reads their results waits for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tarry
from tarry.distributed import groups
from tests.distributed.world import run

MANY = 100_000
"""Elements of a collective that is worth a cut."""


def overlapping() -> tuple[list[float], bool]:
    """Two all-reduces before anything is read: their sums, and whether the second began before the first was done."""
    x, y = torch.full((MANY,), dist.get_rank() + 1.0).to("tarry"), torch.ones(MANY).to("tarry")
    with tarry.events.record() as seen:
        dist.all_reduce(x)
        z = y.sin().cos()
        dist.all_reduce(y)
        both = x + y
        values = [float(both[0]), float(both[-1])]
        assert abs(float(z[0]) - 0.6663667) < 1e-5
    first, second = [event for event in seen if event.kind == "collective"]
    return values, second.fields["start"] < first.time


def inputs_are_kept() -> list[float]:
    """What a collective reads is written while it may go on."""
    x = torch.full((MANY,), dist.get_rank() + 1.0).to("tarry")
    gathered = torch.zeros(2 * MANY, device="tarry")
    dist.all_gather_into_tensor(gathered, x)
    x.add_(10)
    tarry.sync()
    return [float(gathered[0]), float(gathered[-1]), float(x[0])]


def two_groups() -> list[float]:
    other = dist.new_group([0, 1])
    x, y = torch.ones(MANY, device="tarry"), torch.full((MANY,), 2.0, device="tarry")
    dist.all_reduce(x)
    dist.all_reduce(y, group=other)
    dist.all_reduce(x, group=other)
    return [float(y[0]), float(x[0])]


def two_of_one_value() -> list[float]:
    """What they write are copies of the same, and a program may make one copy only."""
    x = torch.full((MANY,), dist.get_rank() + 1.0).to("tarry") * 2
    y, z = x.clone(), x.clone()
    dist.broadcast(y, 0)
    dist.all_reduce(z)
    return [float(y[0]), float(z[0])]


def another_operator_fails() -> list[Any]:
    """Between the start of a collective and its wait: the collective is done all the same, and ranks go on together."""
    x, y = torch.ones(MANY, device="tarry"), torch.ones(3, device="tarry")
    dist.all_reduce(x)
    broken = y.index_select(0, torch.tensor([7]).to("tarry"))
    message = ""
    try:
        broken.cpu()
    except Exception as error:
        message = f"{error} {getattr(error, '__notes__', '')}"
    total = float(x[0])
    dist.all_reduce(y)
    return ["index" in message, total, float(y[0])]


def in_one_graph() -> list[Any]:
    """As `another_operator_fails`, but the failure is of an operator that reads the collective's result."""
    x = torch.ones(MANY, device="tarry")
    index = torch.tensor([MANY]).to("tarry")
    dist.all_reduce(x)
    broken = x.index_select(0, index)
    z = x * 2
    messages = []
    for tensor in (broken, z):
        try:
            tensor.cpu()
            messages.append("none")
        except Exception as error:
            messages.append(f"{error} {getattr(error, '__notes__', '')}")
    return ["index" in messages[0], "none" if messages[1] == "none" else "second time" in messages[1]]


CASES: tuple[Callable[[], Any], ...] = (
    *(overlapping, inputs_are_kept, two_groups, two_of_one_value),
    *(another_operator_fails, in_one_graph),
)


def everything() -> dict[str, Any]:
    tarry.config.compile = "wait"
    dist.init_process_group()
    answers: dict[str, Any] = {}
    for case in CASES:
        try:
            answers[case.__name__] = case()
        except Exception as error:
            answers[case.__name__] = repr(error)
        assert not groups._state.outstanding, case.__name__
    dist.destroy_process_group()
    return answers


Answers = tuple[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=["eager", "torchscript"])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return request.param, run(everything, tmp_path_factory.mktemp("world"), backend=request.param)


EXPECTED: dict[str, Any] = {
    "overlapping": ([5.0, 5.0], True),
    "inputs_are_kept": None,
    "two_groups": [4.0, 4.0],
    "two_of_one_value": [2.0, 6.0],
    "another_operator_fails": [True, 2.0, 2.0],
    "in_one_graph": [True, "none"],
}
COMPILED = EXPECTED | {"another_operator_fails": [True, 1.0, 2.0], "in_one_graph": [True, True]}
"""A program that fails after a collective has run is not computed again: what that would have written is as before."""


@pytest.mark.parametrize("case", EXPECTED)
def test_two_processes(answers: Answers, case: str) -> None:
    backend, of_ranks = answers
    for rank, of_rank in enumerate(of_ranks):
        assert isinstance(of_rank, dict), of_rank
        expected = (EXPECTED if backend == "eager" else COMPILED)[case]
        assert of_rank[case] == ([1.0, 2.0, rank + 11.0] if case == "inputs_are_kept" else expected)


def interrupted() -> list[Any]:
    """A wait that is broken off: the collective has failed, nothing hangs, and no tensor stays outstanding."""
    dist.init_process_group()
    x = torch.ones(MANY, device="tarry")
    wait = groups.Outstanding.wait

    def broken(self: groups.Outstanding) -> None:
        wait(self)
        raise KeyboardInterrupt

    groups.Outstanding.wait = broken  # type: ignore[method-assign]
    dist.all_reduce(x)
    y: Tensor = x + 1
    kinds = []
    for tensor in (x, y):
        try:
            tensor.cpu()
            kinds.append("none")
        except BaseException as error:
            kinds.append(type(error).__name__)
        groups.Outstanding.wait = wait  # type: ignore[method-assign]
    z = torch.ones(2, device="tarry")
    dist.all_reduce(z)
    return [kinds, float(z[0]), len(groups._state.outstanding)]


def test_an_interrupt_while_waiting(tmp_path: Path) -> None:
    for kinds, after, outstanding in run(interrupted, tmp_path):
        assert kinds == ["KeyboardInterrupt", "KeyboardInterrupt"]
        assert (after, outstanding) == (2.0, 0)
