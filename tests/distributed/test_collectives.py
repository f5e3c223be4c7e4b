"""Every collective on tensors of the device against gloo on tensors of the CPU, on two processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

import tarry
from tarry.distributed import operators
from tarry.ir.operators import COLLECTIVES
from tests.distributed.world import run

CASES: dict[str, Callable[[str], Any]] = {}


def case(function: Callable[[str], Any]) -> Callable[[str], Any]:
    CASES[function.__name__] = function
    return function


def numbers(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    return torch.randint(-50, 50, sizes, generator=generator).float()


@case
def all_reduce(device: str) -> Tensor:
    x = numbers(4).to(device)
    dist.all_reduce(x)
    return x


@case
def all_reduce_max_of_a_view(device: str) -> Tensor:
    x = numbers(4, 3).to(device)
    if device == "cpu":  # gloo takes what lies in memory, whatever the strides
        part = x.t()[1:].contiguous()
        dist.all_reduce(part, dist.ReduceOp.MAX)
        x.t()[1:].copy_(part)
    else:
        dist.all_reduce(x.t()[1:], dist.ReduceOp.MAX)
    return x


@case
def all_reduce_asynchronous(device: str) -> Tensor:
    x = numbers(4).to(device)
    work = dist.all_reduce(x, async_op=True)
    work.wait(timedelta(seconds=30))
    assert work.is_completed()
    (result,) = work.get_future().value()
    (doubled,) = work.get_future().then(lambda future: [future.value()[0] * 2]).wait()
    return result + x + doubled


@case
def all_reduce_coalesced(device: str) -> list[Tensor]:
    tensors = [numbers(3).to(device), numbers(2, 2).to(device)]
    dist.all_reduce_coalesced(tensors)
    return tensors


@case
def all_reduce_of_what_is_pending(device: str) -> Tensor:
    x = numbers(4).to(device) * 2 + 1
    dist.all_reduce(x)
    return x / 2


@case
def a_result_that_nothing_reads(device: str) -> Tensor:
    dist.all_reduce(numbers(3).to(device))
    x = numbers(4).to(device)
    dist.all_reduce(x)
    return x


@case
def broadcast(device: str) -> Tensor:
    x = numbers(4).to(device)
    dist.broadcast(x, 1)
    return x


@case
def reduce(device: str) -> Tensor:
    x = numbers(3).to(device)
    dist.reduce(x, 1)
    return x if dist.get_rank() == 1 else x * 0


@case
def all_gather(device: str) -> list[Tensor]:
    outputs = [torch.zeros(3, device=device) for _ in range(2)]
    dist.all_gather(outputs, numbers(3).to(device))
    return outputs


@case
def all_gather_into_tensor(device: str) -> Tensor:
    output = torch.zeros(4, 3, device=device)
    dist.all_gather_into_tensor(output, numbers(2, 3).to(device))
    return output


@case
def all_gather_object(device: str) -> list[Tensor]:
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"x": numbers(2).to(device)})
    return [each["x"] for each in objects]


@case
def broadcast_object_list(device: str) -> Tensor:
    objects = [int(numbers(1).to(device))]
    dist.broadcast_object_list(objects, 1)
    return torch.tensor(objects)


@case
def reduce_scatter(device: str) -> Tensor:
    output = torch.zeros(3, device=device)
    dist.reduce_scatter(output, list(numbers(2, 3).to(device).unbind()))
    return output


@case
def reduce_scatter_tensor(device: str) -> Tensor:
    output = torch.zeros(2, 3, device=device)
    dist.reduce_scatter_tensor(output, numbers(4, 3).to(device))
    return output


@case
def all_to_all_single(device: str) -> Tensor:
    output = torch.zeros(4, 2, device=device)
    dist.all_to_all_single(output, numbers(4, 2).to(device))
    return output


@case
def all_to_all_single_with_splits(device: str) -> Tensor:
    rank = dist.get_rank()
    output = torch.zeros(2 if rank == 0 else 4, device=device)
    splits = ([1, 1], [1, 2]) if rank == 0 else ([2, 2], [1, 2])
    dist.all_to_all_single(output, numbers(3).to(device), *splits)
    return output


@case
def gather(device: str) -> list[Tensor]:
    outputs = [torch.zeros(3, device=device) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(numbers(3).to(device), outputs)
    return outputs or [torch.zeros(1)]


@case
def scatter(device: str) -> Tensor:
    output = torch.zeros(3, device=device)
    dist.scatter(output, list(numbers(2, 3).to(device).unbind()) if dist.get_rank() == 0 else None)
    return output


@case
def send_and_receive(device: str) -> Tensor:
    x = numbers(3).to(device) + 1
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        assert dist.recv(x) == 0
    return x


@case
def batched_messages(device: str) -> Tensor:
    rank = dist.get_rank()
    x, y = numbers(100_000).to(device), torch.zeros(100_000, device=device)
    receive = dist.P2POp(dist.irecv, y, 1 - rank)
    for work in dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, x, 1 - rank)]):
        work.wait()
    return y


@case
def functional_collectives(device: str) -> list[Tensor]:
    world = dist.group.WORLD
    x = numbers(2, 3).to(device)
    results = [
        functional.all_reduce(x, "sum", world),
        functional.all_gather_tensor(x, 0, world),
        functional.reduce_scatter_tensor(x, "sum", 0, world),
        functional.broadcast(x, 1, world),
        functional.all_to_all_single(x, None, None, world),
        *functional.all_reduce_coalesced([x, x * 2], "max", world),
    ]
    return [result + 1 for result in results]


@case
def a_subgroup(device: str) -> Tensor:
    group = dist.new_group([1])
    x = numbers(4).to(device)
    if dist.get_rank() == 1:
        dist.all_reduce(x, group=group)
    return x


@case
def collectives_of_both_devices(device: str) -> Tensor:
    """One of the CPU's comes after what is recorded before it, also where nothing was read in between."""
    x, y = numbers(4).to(device), numbers(4)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        x = x + float(x[0])
    else:
        x = x + x[0]
    dist.all_reduce(y, dist.ReduceOp.MAX)
    dist.barrier()
    return x.cpu() + y


@case
def waited_for_in_another_order(device: str) -> Tensor:
    tensors = [numbers(3).to(device) + k for k in range(3)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    return torch.stack(tensors)


@case
def in_a_hook_of_a_gradient(device: str) -> Tensor:
    def reduced(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient

    x = numbers(3).to(device).requires_grad_()
    x.register_hook(reduced)
    (x * numbers(3).to(device)).sum().backward()
    assert x.grad is not None
    return x.grad


@case
def groups_in_turn(device: str) -> Tensor:
    """Two of all ranks; and one of a rank alone, which calls it more often than the other calls its own."""
    both, rank = (dist.new_group([0, 1]), dist.new_group([1, 0])), dist.get_rank()
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    x = numbers(3).to(device)
    dist.all_reduce(x, group=both[0])
    for _ in range(1 + 3 * rank):
        dist.all_reduce(x, group=own)
    dist.all_reduce(x, group=both[1])
    dist.all_reduce(x, dist.ReduceOp.MAX, group=both[0])
    return x


@case
def a_barrier_and_objects_between(device: str) -> Tensor:
    x = numbers(3).to(device)
    dist.all_reduce(x)
    dist.barrier(device_ids=[dist.get_rank()] if device == "tarry" else None)  # as programs for CUDA have it
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, float(x.sum()))
    dist.all_reduce(x)
    return x + objects[0] + objects[1]


@case
def a_thread_beside_the_program(device: str) -> Tensor:
    """As one that saves a checkpoint: what it waits for is not what the program has recorded, which another rank begins
    when its own thread has ended."""
    beside = dist.new_group(backend="gloo")

    def communicate() -> None:
        if device == "tarry":
            torch.accelerator.synchronize()
        dist.barrier(beside)

    thread = threading.Thread(target=communicate)
    x = numbers(3).to(device)
    first = dist.get_rank() == 0
    work = dist.all_reduce(x, async_op=True) if first else None
    thread.start()
    thread.join()
    work = work or dist.all_reduce(x, async_op=True)
    work.wait()
    return x


@case
def gather_and_reduce_to_ranks_of_other_sizes(device: str) -> list[Tensor]:
    """As NCCL does. gloo can broadcast and reduce them one by one."""
    rank = dist.get_rank()
    gathered = [torch.zeros(k + 1, 2, device=device) for k in range(2)]
    parts = [numbers(k + 1, 2).to(device) for k in range(2)]
    output = torch.zeros(rank + 1, 2, device=device)
    if device == "tarry":
        dist.all_gather(gathered, parts[rank] + rank)
        dist.reduce_scatter(output, parts)
        return [*gathered, output]
    for k in range(2):
        gathered[k].copy_(parts[k] + k)
        dist.broadcast(gathered[k], k)
        dist.reduce(parts[k], k)
    return [*gathered, parts[rank]]


@case
def sparse_tensors_are_summed(device: str) -> list[Tensor]:
    rank = dist.get_rank()
    x = torch.sparse_coo_tensor(torch.tensor([[0, rank, rank]]), torch.tensor([1.0, 2.0, 3.0]), (4,)).to(device)
    dist.all_reduce(x)
    embedding = nn.Embedding(6, 2, sparse=True)
    nn.init.constant_(embedding.weight, 0.5)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(embedding, nn.Tanh()).to(device))
    model(torch.tensor([1, 2 + rank]).to(device)).square().sum().backward()
    gradient = model.module[0].weight.grad
    assert gradient.is_sparse
    return [x.to_dense(), x.coalesce().indices(), gradient.to_dense()]


@case
def dtypes_that_gloo_does_not_know_are_moved(device: str) -> list[Tensor]:
    results = []
    for dtype in (torch.int16, torch.float8_e4m3fn, torch.complex64):

        def given(*sizes: int, dtype: torch.dtype = dtype if device == "tarry" else torch.float32) -> Tensor:
            return numbers(*sizes).clamp(-8, 8).to(dtype).to(device)

        outputs = [[torch.zeros_like(given(3)) for _ in range(2)] for _ in range(2)]
        dist.all_gather(outputs[0], given(3))
        results += outputs[0]
        for x in (given(2, 2), given(1)[0]):
            dist.broadcast(x, 1)
            results.append(x)
        exchanged = torch.zeros_like(given(4))
        dist.all_to_all_single(exchanged, given(4))
        part = torch.zeros_like(given(3))
        dist.scatter(part, [given(3), given(3)] if dist.get_rank() == 0 else None)
        results += [exchanged, part]
        dist.gather(given(3), outputs[1] if dist.get_rank() == 0 else None)
        results += outputs[1]
    return [result.cpu().to(torch.complex64) for result in results]


@case
def average_of_whole_numbers(device: str) -> Tensor:
    x = numbers(5).long().to(device)
    dist.all_reduce(x, dist.ReduceOp.AVG if device == "tarry" else dist.ReduceOp.SUM)
    return x if device == "tarry" else x.div(2, rounding_mode="trunc")  # gloo has no averages


def everything() -> dict[str, Any]:
    dist.init_process_group()
    answers: dict[str, Any] = {}
    for name, function in CASES.items():
        results = [torch.utils._pytree.tree_map(lambda x: x.cpu(), function(device)) for device in ("cpu", "tarry")]
        answers[name] = results
    average = numbers(3).to("tarry")
    dist.all_reduce(average, dist.ReduceOp.AVG)
    total = numbers(3)
    dist.all_reduce(total)
    answers["average"] = [total / 2, average.cpu()]
    scaled = numbers(3).to("tarry")
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    answers["scaled"] = [total / 2, scaled.cpu()]
    syncs = tarry.metrics.counters().get("sync", 0)
    x = numbers(3).to("tarry")
    for _ in range(3):
        dist.all_reduce(x)
        x = x / 2
    assert tarry.metrics.counters().get("sync", 0) == syncs, "a collective has ended the step"
    answers["one_graph"] = [_thrice(numbers(3)), x.cpu()]
    dist.destroy_process_group()
    return answers


def _thrice(x: Tensor) -> Tensor:
    for _ in range(3):
        dist.all_reduce(x)
        x = x / 2
    return x


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(everything, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("name", [*CASES, "average", "scaled", "one_graph"])
@pytest.mark.parametrize("rank", range(2))
def test_as_gloo_on_the_cpu(answers: list[dict[str, Any]], rank: int, name: str) -> None:
    assert isinstance(answers[rank], dict), answers[rank]
    expected, actual = answers[rank][name]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_ir_knows_all_of_them() -> None:
    assert {f"{operators.NAMESPACE}::{name}" for name in operators._SCHEMAS} == COLLECTIVES


def wrong_calls() -> list[str]:
    """What each says, on all ranks; after all of them, ranks go on together."""
    dist.init_process_group()
    x, y, pair = torch.ones(3, device="tarry"), torch.zeros(2, 3, device="tarry"), [torch.zeros(3, device="tarry")] * 2
    short = torch.ones(3, dtype=torch.int16, device="tarry")
    root = dist.get_rank() == 0
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_gather([y, y], x),
        lambda: dist.all_gather([*pair, x], x),
        lambda: dist.all_gather_into_tensor(x, x),
        lambda: dist.reduce_scatter(x, [x[:1], x[:1]]),
        lambda: dist.reduce_scatter(x, [x]),
        lambda: dist.reduce_scatter_tensor(x, x),
        lambda: dist.gather(x, [y, y]) if root else None,
        lambda: dist.scatter(x, [y, y]) if root else None,
        lambda: dist.scatter(x, [x]) if root else None,
        lambda: dist.all_to_all([x], [x]),
        lambda: dist.all_to_all_single(torch.zeros(2, 2, device="tarry"), y),
        lambda: dist.all_to_all_single(x, x),
        lambda: dist.all_reduce(short),
        lambda: dist.all_reduce(x, dist.ReduceOp.BAND),
        lambda: dist.reduce_scatter_tensor(short[:1], short[:2]),
        lambda: dist.broadcast(torch.eye(3).to_sparse().to("tarry"), 0),
    ]
    answers = []
    for k, call in enumerate(calls):
        try:
            call()
            answers.append(f"{k}: {'no error' if root or not 6 <= k <= 8 else 'error'}")
        except (ValueError, TypeError, NotImplementedError):
            answers.append(f"{k}: error")
    dist.all_reduce(x)
    return [*answers, str(x.tolist())]


def test_wrong_arguments_are_errors_at_the_call(tmp_path: Path) -> None:
    assert run(wrong_calls, tmp_path) == [[*(f"{k}: error" for k in range(16)), "[2.0, 2.0, 2.0]"]] * 2


def names_of_groups(backend: str) -> Tensor:
    dist.init_process_group(backend)
    x = torch.full((2,), dist.get_rank() + 1.0).to("tarry")
    dist.all_reduce(x)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # the old store may live a little longer
    dist.init_process_group(backend)  # and again
    dist.all_reduce(x)
    return x.cpu()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "tarry", "cpu:gloo,tarry:gloo", "cpu:gloo,tarry:tarry"])
def test_backends_by_name(tmp_path: Path, backend: str) -> None:
    assert [list(x) for x in run(names_of_groups, tmp_path, backend)] == [[6.0, 6.0]] * 2
