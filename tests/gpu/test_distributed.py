"""torch.distributed on one GPU: a world of one rank is all that one device can show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tarry
from tarry.backends.inductor import InductorBackend
from tests.distributed.world import run

pytestmark = pytest.mark.gpu

STEPS = 8


def _trained(device: str) -> tuple[torch.Tensor, dict[str, float]]:
    """The losses of a model in DDP whose process group has NCCL, and tarry's counters of the training."""
    tarry.set_backend(InductorBackend("cuda"), "cuda", compile="wait")
    dist.init_process_group("cpu:gloo,cuda:nccl,tarry:gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1)).to(device)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    tarry.metrics.reset()
    for _ in range(STEPS):
        x = torch.randn(4, 8).to(device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    counters = tarry.metrics.counters()
    return torch.stack(losses).cpu(), counters


def test_a_step_of_ddp_in_a_world_of_one_is_one_cuda_graph(tmp_path: Path) -> None:
    results = []
    for device in ("cpu", "tarry"):
        (tmp_path / device).mkdir()
        results += run(_trained, tmp_path / device, device, size=1)
    (expected, _), (actual, counters) = results
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    assert counters["inductor/cuda_graphs"] >= 1
    assert "inductor/not_captured" not in counters
    assert counters["sync"] == STEPS, "a step is cut once"
