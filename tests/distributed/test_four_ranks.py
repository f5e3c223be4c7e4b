"""Four processes: two-dimensional meshes, and checkpoints that other numbers of processes load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.distributed.models import GPT, gpt, texts, train
from tests.distributed.world import run

Answer = tuple[Tensor, list[int]]


def tensor_parallel(model: GPT, mesh: DeviceMesh) -> GPT:
    """Each layer's weights on the ranks of the mesh; between the blocks, each rank has a part of the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "query": ColwiseParallel(input_layouts=Shard(1)),
            "key": ColwiseParallel(input_layouts=Shard(1)),
            "value": ColwiseParallel(input_layouts=Shard(1)),
            "out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return model


def two_by_two(device: str) -> tuple[nn.Module, Any]:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "model"))
    model = tensor_parallel(gpt(device), mesh["model"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train_two_by_two(device: str) -> Answer:
    model, optimizer = two_by_two(device)
    return train(model, optimizer, texts, device, seed=7 + dist.get_rank() // 2)


# ---- checkpoints


def sharded(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = gpt(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    parameters, state = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=state)


def begin(folder: Path) -> dict[str, Any]:
    """On four ranks: the programs of two dimensions, and two steps whose end is saved."""
    dist.init_process_group()
    answers = {"two_by_two": (*train_two_by_two("cpu"), *train_two_by_two("tarry"))}
    model, optimizer = sharded("tarry")
    answers["begun"] = train(model, optimizer, texts, "tarry", steps=2, seed=1)
    save(model, optimizer, folder / "of four")
    dist.destroy_process_group()
    return answers


def resume(folder: Path) -> dict[str, Any]:
    """On two ranks: two steps more, from a checkpoint of four ranks, and from one of eager PyTorch."""
    dist.init_process_group()
    answers = {}
    for name in ("of four", "of eager"):
        model, optimizer = sharded("tarry")
        load(model, optimizer, folder / name)
        answers[name] = train(model, optimizer, texts, "tarry", steps=2, seed=2)
    save(model, optimizer, folder / "of two")
    dist.destroy_process_group()
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def begun(folder: Path) -> list[dict[str, Any]]:
    return run(begin, folder, folder, size=4)


def eager() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = gpt("cpu")
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_tensor_parallel_by_data_parallel(begun: list[dict[str, Any]]) -> None:
    for of_rank in begun:
        assert isinstance(of_rank, dict), of_rank
        expected, _, actual, cuts = of_rank["two_by_two"]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert cuts == [1] * 5


def test_checkpoints_of_others(begun: list[dict[str, Any]], folder: Path) -> None:
    """Every rank trains on the same batches, so one process in eager PyTorch has the same losses."""
    model, optimizer = eager()
    first, _ = train(model, optimizer, texts, "cpu", steps=2, seed=1)
    save(model, optimizer, folder / "of eager")
    then, _ = train(model, optimizer, texts, "cpu", steps=2, seed=2)
    for of_rank in begun:
        torch.testing.assert_close(of_rank["begun"][0], first, rtol=1e-5, atol=1e-5)
    for of_rank in run(resume, folder, folder):
        assert isinstance(of_rank, dict), of_rank
        for name in ("of four", "of eager"):
            torch.testing.assert_close(of_rank[name][0], then, rtol=1e-5, atol=1e-5)
    after, _ = train(model, optimizer, texts, "cpu", steps=1, seed=3)
    resumed, optimizer = eager()
    load(resumed, optimizer, folder / "of two")
    torch.testing.assert_close(train(resumed, optimizer, texts, "cpu", steps=1, seed=3)[0], after, rtol=1e-5, atol=1e-5)
    resumed, optimizer = eager()
    load(resumed, optimizer, folder / "of four")
    torch.testing.assert_close(train(resumed, optimizer, texts, "cpu", steps=2, seed=2)[0], then, rtol=1e-5, atol=1e-5)
