"""Programs of torch.distributed, unchanged, on two processes: losses as on the CPU, and each step one graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tarry
from tarry import events
from tarry.store import Identity, Store
from tests.distributed.world import run

STEPS = 5


def small_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)


def layers(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)


def ddp(device: str) -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(small_model(device))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def ddp_with_unused_parameters(device: str) -> tuple[nn.Module, Any]:
    plain = layers(device)
    plain[0].unused = nn.Linear(3, 3).to(device)
    model = DistributedDataParallel(plain, find_unused_parameters=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def ddp_with_hook(device: str) -> tuple[nn.Module, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(layers(device), gradient_as_bucket_view=True, static_graph=True)
    model.register_comm_hook(None, fp16_compress_hook)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def zero(device: str) -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(layers(device))
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)


def fsdp(device: str) -> tuple[nn.Module, Any]:
    model = layers(device)
    mesh = init_device_mesh(device, (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def tensor_parallel(device: str) -> tuple[nn.Module, Any]:
    model = layers(device)
    parallelize_module(model, init_device_mesh(device, (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


PROGRAMS: tuple[Callable[[str], tuple[nn.Module, Any]], ...] = (
    ddp,
    ddp_with_unused_parameters,
    ddp_with_hook,
    zero,
    fsdp,
    tensor_parallel,
)


def train(make: Callable[[str], tuple[nn.Module, Any]], device: str) -> tuple[Tensor, list[int]]:
    """The losses, and how often each step was cut."""
    model, optimizer = make(device)
    torch.manual_seed(3 if make is tensor_parallel else 7 + dist.get_rank())
    losses, cuts = [], []
    for _ in range(STEPS):
        before = tarry.metrics.counters().get("sync", 0)
        loss = model(torch.randn(6, 4).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        cuts.append(tarry.metrics.counters().get("sync", 0) - before)
    return torch.stack(losses).cpu(), cuts


def all_programs() -> dict[str, Any]:
    dist.init_process_group()
    answers = {}
    for make in PROGRAMS:
        expected, _ = train(make, "cpu")
        actual, cuts = train(make, "tarry")
        answers[make.__name__] = (expected, actual, cuts)
    dist.destroy_process_group()
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(all_programs, tmp_path_factory.mktemp("training"))


@pytest.mark.parametrize("program", [make.__name__ for make in PROGRAMS])
def test_losses_are_those_of_the_cpu(answers: list[dict[str, Any]], program: str) -> None:
    for of_rank in answers:
        assert isinstance(of_rank, dict), of_rank
        expected, actual, _ = of_rank[program]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("program", ["ddp", "ddp_with_hook", "fsdp", "tensor_parallel"])
def test_a_step_is_one_graph(answers: list[dict[str, Any]], program: str) -> None:
    for of_rank in answers:
        assert of_rank[program][2][3:] == [1] * (STEPS - 3)  # DDP sorts its buckets anew in the first ones


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torchscript", "inductor"])
def test_compiled(tmp_path: Path, backend: str) -> None:
    answers = run(compiled, tmp_path, backend=backend)
    for of_rank in answers:
        assert isinstance(of_rank, dict), of_rank
        for expected, actual in of_rank.values():
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def compiled() -> dict[str, Any]:
    tarry.config.compile = "wait"
    dist.init_process_group()
    answers = {}
    for make in (ddp, fsdp, tensor_parallel):
        answers[make.__name__] = (train(make, "cpu")[0], train(make, "tarry")[0])
    assert not tarry.metrics.counters().get("fallback")
    dist.destroy_process_group()
    return answers


def cold_start(folder: Path) -> tuple[list[str], list[str]]:
    """The programs that this rank has made and kept, and those that it has waited for."""
    kept, waited = [], []
    put = Store.put

    def counted(store: Store, identity: Identity, *args: Any) -> None:
        kept.append(identity.key)
        put(store, identity, *args)

    type(tarry.config).cache_dir = property(lambda self: folder)  # type: ignore[assignment, method-assign]
    Store.put = counted  # type: ignore[method-assign, assignment]
    tarry.config.compile = "wait"
    tarry.config.store = True
    dist.init_process_group()
    with events.subscribe(lambda event: waited.append(event.kind) if event.kind == "store_wait" else None):
        train(ddp, "tarry")
    dist.destroy_process_group()
    return kept, waited


@pytest.mark.slow
def test_one_rank_compiles_and_the_others_wait_for_it(tmp_path: Path) -> None:
    answers = run(cold_start, tmp_path, tmp_path / "cache", backend="inductor")
    kept = [key for of_rank, _ in answers for key in of_rank]
    assert len(kept) == len(set(kept)) > 4
    assert any(waited for _, waited in answers)
