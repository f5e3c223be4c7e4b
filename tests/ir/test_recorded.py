"""Graphs that the native recorder made: legal, and at every stage with the results that the device gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tarry.ir import evaluate, from_raw, verify
from tarry.passes import run_pipeline
from tests.ir.raw import same_bits
from tests.support import tarry_only

pytestmark = tarry_only


def check(tensors: list[torch.Tensor]) -> None:
    """Compare what the stages of the pending graph give with what the device then computes."""
    from tarry.native import C

    batch = C.peek(tensors)
    inputs = [tensor.cpu() for tensor in batch.inputs()]
    graph = from_raw(batch.raw())
    stages = run_pipeline(graph, check=True)
    verify(graph, thorough=True)
    results = {name: evaluate(stage, inputs) for name, stage in stages.graphs.items()}
    actual = [tensor.cpu() for tensor in tensors]
    for name, values in results.items():
        assert len(values) == len(actual)
        for wanted in actual:
            # Outputs are in an order of the recorder's, and in the shape that the storage was made with.
            found = any(
                mine.numel() == wanted.numel() and same_bits(mine.reshape(wanted.shape), wanted) for mine in values
            )
            assert found, f"{wanted} is not among {values} of stage {name}:\n{stages[name]}"


PROGRAMS: dict[str, Callable[[str], list[torch.Tensor]]] = {}


def program(make: Callable[[str], list[torch.Tensor]]) -> Callable[[str], list[torch.Tensor]]:
    PROGRAMS[make.__name__] = make
    return make


@program
def arithmetic(device: str) -> list[torch.Tensor]:
    x = torch.arange(32.0, device=device).view(4, 8)
    return [(x + 2).mul(x.t().contiguous().t()) / 3]


@program
def views_and_writes(device: str) -> list[torch.Tensor]:
    x = torch.ones(4, 8, device=device)
    x[1:3, ::2].mul_(2)
    x.t()[2] = 5
    x.diagonal().add_(torch.arange(4, device=device))
    x[0].copy_(x[3])
    return [x]


@program
def random_numbers(device: str) -> list[torch.Tensor]:
    x = torch.randn(40, device=device)
    return [x, nn.functional.dropout(x), torch.rand_like(x), torch.randperm(9, device=device)]


@program
def copies_from_the_host(device: str) -> list[torch.Tensor]:
    x = torch.randn(3, 4).to(device)
    y = torch.randn(4, 3).t().to(device)
    x.add_(y)
    return [x]


@program
def dtypes(device: str) -> list[torch.Tensor]:
    x = torch.ones(4, dtype=torch.bfloat16, device=device)
    x.mul_(torch.full((4,), 1 / 3, device=device))
    z = torch.ones(4, dtype=torch.complex64, device=device)
    torch.view_as_real(z)[1:].neg_()
    return [x, z]


@program
def batch_norm(device: str) -> list[torch.Tensor]:
    layer = nn.BatchNorm1d(3).to(device)
    y = layer(torch.arange(12.0, device=device).view(4, 3))
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return [y.detach(), layer.running_mean, layer.running_var]


@program
def foreach(device: str) -> list[torch.Tensor]:
    flat = torch.arange(10.0, device=device)
    torch._foreach_mul_([flat[:4].view(2, 2), flat[4:]], [2.0, 3.0])
    return [flat]


@program
def gradients(device: str) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 2)).to(device)
    model(torch.randn(3, 1, 4, 4).to(device)).square().sum().backward()
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return gradients


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, device: str) -> None:
    check(PROGRAMS[name](device))
