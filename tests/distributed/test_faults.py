"""Ranks that do different things, fail or die: an error on all of them within seconds, and no hang."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tarry
from tarry.distributed.agreement import common_length, first_difference
from tests.distributed.world import run


def test_rows_are_compared_as_far_as_all_ranks_know() -> None:
    assert common_length([[2, 7, 8, 0], [3, 7, 8, 9]]) == 2
    assert first_difference([[2, 7, 8, 0], [3, 7, 8, 9]]) is None
    assert first_difference([[2, 7, 8, 0], [2, 7, 9, 0]]) == 1
    assert first_difference([[1, 7, 0, 0], [2, 6, 9, 0]]) == 0


def error_of(function: Any) -> str:
    start = time.monotonic()
    try:
        function()
    except RuntimeError as error:
        assert time.monotonic() - start < 20
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_reduction() -> str:
    dist.init_process_group()
    x = torch.ones(3, device="tarry")
    dist.all_reduce(x, dist.ReduceOp.SUM if dist.get_rank() == 0 else dist.ReduceOp.MAX)
    return error_of(x.cpu)


def test_different_reductions(tmp_path: Path) -> None:
    for message in run(other_reduction, tmp_path):
        assert "CollectiveError" in message
        assert "rank 0: all_reduce of float32[3], SUM at" in message
        assert "rank 1: all_reduce of float32[3], MAX at" in message
        assert "test_faults.py:" in message


def one_more_on_a_rank() -> tuple[str, list[float], list[float]]:
    dist.init_process_group()
    x, y = torch.ones(3, device="tarry"), torch.ones(5, device="tarry")
    for _ in range(3):
        dist.all_reduce(x)
    assert x.cpu().tolist() == [8.0] * 3
    if dist.get_rank() == 1:
        dist.all_reduce(y)
    dist.all_reduce(x)
    message = error_of(x.cpu)
    dist.all_reduce(y)  # all ranks know, and nothing was sent: they can go on together
    return message, x.cpu().tolist(), y.cpu().tolist()


def test_one_more_on_a_rank(tmp_path: Path) -> None:
    for message, x, y in run(one_more_on_a_rank, tmp_path):
        assert "float32[3]" in message
        assert "float32[5]" in message
        assert (x, y) == ([8.0] * 3, [2.0] * 5)


def one_less_before_a_barrier() -> str:
    dist.init_process_group("gloo")
    x = torch.ones(3, device="tarry")
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    return error_of(dist.barrier)


def test_a_barrier_is_no_answer_to_a_collective(tmp_path: Path) -> None:
    messages = run(one_less_before_a_barrier, tmp_path)
    assert all(message.startswith("CollectiveError: ") for message in messages), messages
    told = [message for message in messages if "two ranks wait for each other" in message]
    assert told
    assert all("all_reduce of float32[3], SUM at" in message for message in told)
    assert all("barrier at" in message for message in told)


def what_gloo_refuses() -> list[str]:
    """Its works for reduce_scatter never say that they are completed."""
    from tarry.distributed import kernels

    kernels.check_reduction = lambda *_: None  # it would be an error at the call
    dist.init_process_group()
    x = torch.ones(4, dtype=torch.int16, device="tarry")
    y = x[:2].clone()
    dist.reduce_scatter_tensor(y, x)
    first = error_of(y.cpu)
    z = torch.ones(2, device="tarry")
    dist.all_reduce(z)
    return [first, str(z.tolist())]


def test_a_collective_that_gloo_refuses(tmp_path: Path) -> None:
    for message, after in run(what_gloo_refuses, tmp_path):
        assert "reduce_scatter of int16[2, 2], SUM at" in message
        assert "Invalid scalar type" in message
        assert after == "[2.0, 2.0]"


def an_error_on_a_rank() -> str:
    dist.init_process_group()
    x = torch.ones(4, device="tarry")
    index = torch.tensor([0, 9 if dist.get_rank() == 1 else 1]).to("tarry")
    total = x.index_select(0, index).sum()
    dist.all_reduce(total)
    return error_of(total.cpu) + error_of(lambda: dist.barrier())


def test_an_error_on_a_rank_ends_the_others(tmp_path: Path) -> None:
    survivor, failed = run(an_error_on_a_rank, tmp_path)
    assert "index" in failed.lower()
    assert "out of" in failed.lower()
    assert "Error" in survivor
    assert "no error" not in survivor[:20]


def a_rank_that_dies() -> str:
    dist.init_process_group()
    x = torch.ones(4, device="tarry")
    dist.all_reduce(x)
    assert x.cpu()[0] == 2
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(x)
    return error_of(x.cpu)


def test_a_rank_that_dies(tmp_path: Path) -> None:
    survivor, dead = run(a_rank_that_dies, tmp_path)
    assert dead is None
    assert "CollectiveError: all_reduce of float32[4], SUM at" in survivor


def a_slow_rank() -> float:
    dist.init_process_group()
    x = torch.ones(4, device="tarry")
    if dist.get_rank() == 1:
        time.sleep(4)
    for _ in range(2):
        dist.all_reduce(x)
        x = x / 2
        value = float(x[0])
    return value


@pytest.mark.slow
def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    assert run(a_slow_rank, tmp_path) == [1.0, 1.0]


def cut_elsewhere() -> list[float]:
    dist.init_process_group()
    x = torch.ones(2, device="tarry")
    for _ in range(70):  # more than are compared at once
        dist.all_reduce(x)
        x = x / 2
        if dist.get_rank() == 0:
            assert float(x[0]) == 1
    tarry.sync()
    return x.cpu().tolist()


def test_steps_may_be_cut_at_other_places(tmp_path: Path) -> None:
    assert run(cut_elsewhere, tmp_path) == [[1.0, 1.0]] * 2
