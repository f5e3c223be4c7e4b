"""Values that follow from numbers alone are computed on the host, on devices where a look would have to wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tarry
from tarry.native import C

USES_DEVICE = True

Make = Callable[[str], Tensor]


def _doubled(x: Tensor) -> Tensor:
    return x.add_(x)


def _raised_from(x: Tensor, first: int) -> Tensor:
    x[first:].add_(1)
    return x


def _old_and_new(x: Tensor) -> Tensor:
    old = x * 1
    x.mul_(2)
    return old * 100 + x


KNOWN: dict[str, Make] = {
    "factory": lambda d: torch.arange(3, 9, 2, device=d),
    "packed": lambda d: (torch.arange(16, device=d).reshape(2, 8).diff() != 1).cumsum(-1)[:, -1],
    "all": lambda d: (torch.arange(8, device=d)[None, :] >= torch.arange(4, device=d)[:, None]).all(),
    "views": lambda d: (torch.arange(12, device=d).view(3, 4).t()[1:] + 1)[:, ::2],
    "cat": lambda d: torch.cat([torch.zeros(2, dtype=torch.int64, device=d), torch.arange(3, device=d)]),
    "numbers": lambda d: torch.full((2, 2), 7, dtype=torch.int32, device=d) * 3 - 1,
    "a write": lambda d: torch.arange(4, device=d).add_(1),
    "triangle": lambda d: torch.ones(4, 4, dtype=torch.bool, device=d).tril(-1),
    "a write that reads what it writes": lambda d: _doubled(torch.arange(4, device=d)),
    "a write to a part": lambda d: _raised_from(torch.arange(4, device=d), 1),
    "a write beside the old contents": lambda d: _old_and_new(torch.arange(4, device=d)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_they_are_those_of_the_device_and_nothing_is_cut(name: str) -> None:
    tensor = KNOWN[name]("tarry")
    before = tarry.metrics.counters().get("sync", 0)
    found = C.host_value(tensor)
    assert found is not None
    expected = KNOWN[name]("cpu")
    assert found.device.type == "cpu"
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert tarry.metrics.counters().get("sync", 0) == before
    assert torch.equal(tensor.cpu(), expected), "it is still pending, and comes out the same"


UNKNOWN: dict[str, Make] = {
    "a tensor's contents": lambda d: torch.tensor([1, 2]).to(d) + torch.arange(2, device=d),
    "contents further up": lambda d: (torch.arange(4, device=d) + torch.tensor([1, 2, 3, 4]).to(d) * 0).sum() > 1,
    "floating point": lambda d: torch.arange(4, device=d).float().sin() > 0,
    "a draw": lambda d: torch.randint(0, 9, (4,), device=d),
    "an index": lambda d: torch.arange(4, device=d)[torch.tensor([3, 0])],
    "too much": lambda d: torch.arange(1 << 20, device=d) + 1,
    "done already": lambda d: torch.tensor(5).to(d),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_all_else_is_left_to_the_step(name: str) -> None:
    tensor = UNKNOWN[name]("tarry")
    assert C.host_value(tensor) is None
    tensor.cpu()


def test_a_long_chain_is_left_to_the_step() -> None:
    tensor = torch.arange(4, device="tarry")
    for _ in range(64):
        tensor = tensor + 1
    assert C.host_value(tensor) is None
    assert tensor.tolist() == [64, 65, 66, 67]
