"""A list of tensors that grows: each length is a graph of its own, and only a few of them are compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tarry
from tarry.backends.base import Policy
from tarry.events import record
from tarry.native import C
from tarry.runtime import limits
from tests.backends.simple import Walking
from tests.runtime.portable import using

USES_DEVICE = True
POLICIES: list[Policy] = ["wait", "background"]


def generate(tokens: int, mix: Callable[[list[Tensor]], Tensor], device: str = "tarry") -> list[float]:
    """A cache that is a list, with another tensor at each token."""
    token = torch.ones(1, 4).to(device)
    cache: list[Tensor] = []
    found = []
    for _ in range(tokens):
        cache.append(token * 0.5)
        token = mix(cache)
        found.append(token.sum().item())
    return found


def joined(cache: list[Tensor]) -> Tensor:
    return torch.cat(cache).softmax(0).mean(0, keepdim=True)


def looped(cache: list[Tensor]) -> Tensor:
    total = cache[0] * 1.5
    for each in cache:
        total = total + each.sin()
    return total


def compiles(seen: list[Any]) -> int:
    return sum(event.kind == "compile" for event in seen)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mix", [joined, looped])
def test_a_list_that_grows_is_compiled_for_a_few_lengths(
    policy: Policy, mix: Callable[[list[Tensor]], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(24, mix, "cpu")
    with using(Walking(), policy), record() as seen, caplog.at_level(logging.WARNING, logger="tarry"):
        for _ in range(4):
            assert generate(24, mix) == pytest.approx(expected)
            tarry.wait_for_compiles()
    assert 0 < compiles(seen) <= limits.MAX_LENGTHS + 4  # those of the prompt, and of the first tokens
    (line,) = [entry.getMessage() for entry in caplog.records if "numbers of inputs" in entry.getMessage()]
    assert "test_sites.py:" in line
    assert "torch.cat([cache, new])" in line


@pytest.mark.parametrize("policy", POLICIES)
def test_what_comes_many_times_in_a_row_is_compiled_all_the_same(policy: Policy) -> None:
    """A model of another depth has as many steps as any other: it is not the list of a generation."""
    with using(Walking(), policy), record() as seen:
        for depth in range(2, 16):
            for _ in range(limits.LENGTH_PERSISTENCE + 4):
                looped([torch.ones(4).to("tarry")] * depth).tolist()
                tarry.wait_for_compiles()
    assert compiles(seen) >= 14


def test_graphs_that_differ_in_anything_else_are_not_counted() -> None:
    """Many programs from one line: types, ranks, constants."""
    dtypes = (torch.float32, torch.float64, torch.int32, torch.int64)
    with using(Walking()) as backend:
        for rank in range(1, 5):
            for dtype in dtypes:
                for dim in range(rank):
                    x = torch.ones((2,) * rank, dtype=dtype).to("tarry")
                    assert x.sum(dim).flatten()[0].item() == 2
        graphs = [graph for graph in backend.graphs if any("sum" in node.op for node in graph.nodes)]
    assert len(graphs) >= 16


def test_a_site_is_operators_and_lines() -> None:
    def site(count: int, name: str = "sin") -> Any:
        cache = [torch.ones(3).to("tarry") for _ in range(count)]
        tarry.mark_step()
        return C.peek([getattr(torch.cat(cache), name)()]).call_site()

    assert site(2) == site(3)
    assert site(2) != site(2, "cos")
    x = torch.ones(3).to("tarry")
    assert C.peek([x.sin()]).call_site() != C.peek([(x.sin())]).call_site()
