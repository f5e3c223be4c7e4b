"""More programs of torch.distributed, unchanged, on two processes: a GPT and a CNN, with losses as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.distributed.models import GPT, cnn, gpt, loss_of, one_step, pictures, texts, train
from tests.distributed.world import run

Answer = tuple[Tensor, list[int]]
PROGRAMS: dict[str, Callable[[str], Answer]] = {}


def program(function: Callable[[str], Answer]) -> Callable[[str], Answer]:
    PROGRAMS[function.__name__] = function
    return function


def own_seed() -> int:
    return 7 + dist.get_rank()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# ---- DDP


@program
def ddp_gpt(device: str) -> Answer:
    model = DistributedDataParallel(gpt(device), bucket_cap_mb=0.01)
    return train(model, adamw(model), texts, device, seed=own_seed())


@program
def ddp_cnn(device: str) -> Answer:
    model = DistributedDataParallel(cnn(device), gradient_as_bucket_view=True)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), pictures, device, seed=own_seed())


def accumulated(model: Any, optimizer: Any, batch: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    optimizer.zero_grad()
    total = 0
    for k in range(3):
        with model.no_sync() if k < 2 else nullcontext():
            x, y = batch()
            loss = loss_of(model(x), y) / 3
            loss.backward()
            total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


@program
def ddp_with_accumulation(device: str) -> Answer:
    model = DistributedDataParallel(gpt(device))
    return train(model, adamw(model), texts, device, seed=own_seed(), step=accumulated)


@program
def ddp_static_graph(device: str) -> Answer:
    model = DistributedDataParallel(gpt(device), static_graph=True)
    return train(model, adamw(model), texts, device, seed=own_seed())


class Branching(nn.Module):
    """Ranks use other parts of it at other steps."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.others = GPT(1), nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.others[(self.calls + dist.get_rank()) % 2](self.gpt(x))


@program
def ddp_with_unused_parameters(device: str) -> Answer:
    torch.manual_seed(0)
    model = DistributedDataParallel(Branching().to(device), find_unused_parameters=True)
    return train(model, adamw(model), texts, device, seed=own_seed(), steps=6)


@program
def ddp_fp16_hook(device: str) -> Answer:
    model = DistributedDataParallel(gpt(device))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model, adamw(model), texts, device, seed=own_seed())


@program
def ddp_fp16_hook_of_the_reducer(device: str) -> Answer:
    model = DistributedDataParallel(gpt(device))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return train(model, adamw(model), texts, device, seed=own_seed())


@program
def ddp_power_sgd(device: str) -> Answer:
    model = DistributedDataParallel(cnn(device))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.05), pictures, device, seed=own_seed(), steps=7)


@program
def ddp_own_hook(device: str) -> Answer:
    def halve(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations, which are text here
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 4)

    model = DistributedDataParallel(gpt(device))
    model.register_comm_hook(None, halve)
    return train(model, adamw(model), texts, device, seed=own_seed())


@program
def zero_of_a_gpt(device: str) -> Answer:
    model = DistributedDataParallel(gpt(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return train(model, optimizer, texts, device, seed=own_seed())


@program
def a_distributed_sampler(device: str) -> Answer:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(23, 3, 8, 8), torch.randint(5, (23,)))
    sampler = DistributedSampler(data, shuffle=True)
    model = DistributedDataParallel(cnn(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=4, sampler=sampler):
            batch = (x.to(device), y.to(device))
            losses.append(one_step(model, optimizer, lambda batch=batch: batch).detach())
    return torch.stack(losses).cpu(), []


# ---- FSDP2


def sharded(device: str, **options: Any) -> nn.Module:
    model = gpt(device)
    mesh = init_device_mesh(device, (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@program
def fsdp_resharded(device: str) -> Answer:
    model = sharded(device, reshard_after_forward=True)
    return train(model, adamw(model), texts, device, seed=own_seed())


@program
def fsdp_not_resharded(device: str) -> Answer:
    model = sharded(device, reshard_after_forward=False)
    return train(model, adamw(model), texts, device, seed=own_seed())


@program
def fsdp_mixed_precision(device: str) -> Answer:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(device, mp_policy=policy)
    return train(model, adamw(model), texts, device, seed=own_seed())


@program
def fsdp_offloaded(device: str) -> Answer:
    model = sharded("cpu", offload_policy=CPUOffloadPolicy(pin_memory=False)) if device == "cpu" else None
    if model is None:
        model = gpt("cpu")
        mesh = init_device_mesh(device, (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return train(model, adamw(model), texts, device, seed=own_seed())


@program
def fsdp_with_accumulation(device: str) -> Answer:
    def step(model: Any, optimizer: Any, batch: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        optimizer.zero_grad()
        for k in range(2):
            model.set_requires_gradient_sync(k == 1)
            x, y = batch()
            loss = loss_of(model(x), y) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    model = sharded(device)
    return train(model, adamw(model), texts, device, seed=own_seed(), step=step)


@program
def fsdp_cnn(device: str) -> Answer:
    model = fully_shard(cnn(device), mesh=init_device_mesh(device, (2,)))
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), pictures, device, seed=own_seed())


# ---- pipelines


def piped(device: str, schedule_class: Any) -> Answer:
    torch.manual_seed(0)
    whole = GPT()
    rank = dist.get_rank()

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.block = whole.tokens, whole.blocks[0]

        def forward(self, tokens: Tensor) -> Tensor:
            return self.block(self.tokens(tokens))

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.norm, self.head = whole.blocks[1], whole.norm, whole.head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.block(x)))

    module = (Last() if rank else First()).to(device)
    stage = PipelineStage(module, rank, 2, torch.device(device))
    schedule = schedule_class(stage, n_microbatches=2, loss_fn=loss_of)
    optimizer = adamw(module)
    torch.manual_seed(5)
    losses = []
    for _ in range(4):
        x, y = texts(device)
        optimizer.zero_grad()
        parts: list[Tensor] = []
        if rank:
            schedule.step(target=y, losses=parts)
        else:
            schedule.step(x)
        optimizer.step()
        losses.append(torch.stack(parts).mean().detach() if parts else torch.zeros(()))
    return torch.stack([loss.cpu() for loss in losses]), []


@program
def pipeline_gpipe(device: str) -> Answer:
    return piped(device, ScheduleGPipe)


@program
def pipeline_1f1b(device: str) -> Answer:
    return piped(device, Schedule1F1B)


def synchronised_batch_norm(device: str) -> Answer:
    """The CPU has no SyncBatchNorm: on one rank, a BatchNorm of all ranks' batches is the same."""
    batch, rank = 4, dist.get_rank()
    if device == "tarry":
        model: nn.Module = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(cnn(device)))
    else:
        model = cnn(device)

    def pictures_of_both(device: str) -> tuple[Tensor, Tensor]:
        x, y = torch.randn(2 * batch, 3, 8, 8), torch.randint(5, (2 * batch,))
        part = slice(rank * batch, (rank + 1) * batch) if device == "tarry" else slice(None)
        return x[part].to(device), y[part].to(device)

    losses, cuts = train(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures_of_both, device)
    statistics = [buffer.cpu().float().flatten() for name, buffer in model.named_buffers()]
    if device == "tarry":
        losses = losses.to(device)
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        model.eval()
    return torch.cat([losses.cpu(), *statistics]), cuts


PROGRAMS["synchronised_batch_norm"] = synchronised_batch_norm


@program
def batches_of_other_sizes_are_normalised_together(device: str) -> Answer:
    """Also one that is empty."""
    results = []
    for sizes in ((3, 5), (4, 0)):
        torch.manual_seed(1)
        x = torch.randn(sum(sizes), 3, 2, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
        scales = torch.arange(x.numel()).view(x.shape).double()
        rank = dist.get_rank()
        part = slice(0, sizes[0]) if rank == 0 else slice(sizes[0], None)
        norm: nn.Module = nn.BatchNorm2d(3).double()
        if device == "tarry":
            norm = nn.SyncBatchNorm.convert_sync_batchnorm(norm).to(device)
            x, scales = x[part].to(device), scales[part].to(device)
        x.requires_grad_()
        norm.train()(x).mul(scales).sum().backward()
        gradients = [parameter.grad for parameter in norm.parameters()]
        if device == "tarry":
            for gradient in gradients:
                dist.all_reduce(gradient)
        of_x = x.grad if device == "tarry" else x.grad[part]
        results += [of_x, *gradients, norm.running_mean, norm.running_var]
    return torch.cat([result.cpu().flatten() for result in results]), []


def all_programs(names: list[str]) -> dict[str, Any]:
    dist.init_process_group()
    answers: dict[str, Any] = {}
    for name in names:
        answers[name] = (*PROGRAMS[name]("cpu"), *PROGRAMS[name]("tarry"))
    dist.destroy_process_group()
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(all_programs, tmp_path_factory.mktemp("programs"), list(PROGRAMS))


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_are_those_of_the_cpu(answers: list[dict[str, Any]], name: str) -> None:
    for of_rank in answers:
        assert isinstance(of_rank, dict), of_rank
        expected, _, actual, _ = of_rank[name]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


ONE_GRAPH = (
    *("ddp_gpt", "ddp_cnn", "ddp_with_accumulation", "ddp_static_graph", "ddp_fp16_hook", "ddp_power_sgd"),
    *("ddp_own_hook", "zero_of_a_gpt", "fsdp_resharded", "fsdp_not_resharded", "fsdp_mixed_precision"),
    *("fsdp_with_accumulation", "fsdp_cnn", "synchronised_batch_norm"),
)


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_a_step_is_one_graph(answers: list[dict[str, Any]], name: str) -> None:
    for of_rank in answers:
        assert of_rank[name][3][3:] == [1] * len(of_rank[name][3][3:])  # DDP sorts its buckets anew in the first ones
