"""A group of one rank: nothing is sent, and what programs compute is what gloo gives on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

import tarry
from tests.distributed.world import run


def collectives(device: str) -> list[Tensor]:
    """All of them, on tensors that are views and are written afterwards."""
    world = dist.group.WORLD
    x = torch.arange(12.0).view(3, 4).to(device).t()
    if device == "cpu":  # gloo takes what lies in memory, whatever the strides
        x = x.contiguous()
    results = [torch.zeros(4, 3, device=device) for _ in range(6)]
    y = x.clone()
    dist.all_reduce(y)
    dist.all_reduce(y, dist.ReduceOp.MAX)
    dist.broadcast(y, 0)
    dist.reduce(y, 0)
    dist.all_gather([results[0]], x)
    dist.all_gather_into_tensor(results[1], x.contiguous())
    dist.reduce_scatter(results[2], [x])
    dist.reduce_scatter_tensor(results[3], x.contiguous())
    dist.gather(x, [results[4]])
    dist.scatter(results[5], [x])
    exchanged = torch.zeros(4, 3, device=device)
    dist.all_to_all_single(exchanged, x.contiguous())
    whole = x.clone(memory_format=torch.contiguous_format)
    given = [
        functional.all_reduce(whole, "sum", world),
        functional.all_gather_tensor(whole, 0, world),
        functional.reduce_scatter_tensor(whole, "sum", 0, world),
        functional.broadcast(whole, 0, world),
        functional.all_to_all_single(whole, None, None, world),
    ]
    given = [result + 0 for result in given]
    x.add_(1)
    whole.zero_()
    return [y, x, *results, exchanged, *given]


def answers() -> list[Any]:
    dist.init_process_group()
    on_cpu, on_tarry = collectives("cpu"), collectives("tarry")
    text = str(tarry.graph(*on_tarry))
    scaled = torch.ones(3).to("tarry")
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    return [on_cpu, [tensor.cpu() for tensor in on_tarry], text, scaled.cpu()]


def trained(device: str) -> Tensor:
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(6, 4).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def test_every_collective(tmp_path: Path) -> None:
    ((on_cpu, on_tarry, text, scaled),) = run(answers, tmp_path, size=1)
    for expected, actual in zip(on_cpu, on_tarry, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert scaled.tolist() == [0.5] * 3
    assert "tarry_c10d" not in text


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    results = []
    for device in ("cpu", "tarry"):
        (tmp_path / device).mkdir()
        results += run(trained, tmp_path / device, device, size=1)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
