"""One process as a rank of a large world: PyTorch's fake process group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import tarry
from benchmarks.distributed_scale import sent

USES_DEVICE = True
ROOT = Path(__file__).parent.parent.parent


def test_nobody_has_to_agree() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=1024)
    x, y = torch.ones(5, device="tarry"), torch.zeros(1024, 5, device="tarry")
    with tarry.events.record() as seen:
        dist.all_gather_into_tensor(y, x)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        tarry.sync()
    dist.destroy_process_group()
    done = [event.fields for event in seen if event.kind == "collective"]
    assert sorted((each["bytes"], each["ranks"]) for each in done) == [(20, 1024), (1024 * 20, 1024)]
    assert "all_reduce of float32[5], MAX" in [each["op"] for each in done]


def test_a_row_of_the_table() -> None:
    command = [sys.executable, "-m", "benchmarks.distributed_scale", "--child", "ddp", "1024", "1", "64"]
    done = subprocess.run([*command, "--backend", "eager"], capture_output=True, text=True, cwd=ROOT, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    parameters = 2 * 8192 * 64 + 128 * 64 + 2 * 64 + 12 * 64 * 64 + 4 * 64
    assert row["sent"] == pytest.approx(sent("all_reduce", 4 * parameters, 1024))
    assert row["collectives"] == 2  # DDP's buckets
    assert row["steps"] == 1
    assert row["peak"] > 4 * 4 * parameters


def test_bytes_round_a_ring() -> None:
    assert sent("all_reduce of float32[4], SUM", 16, 4) == 24
    assert sent("all_gather of float32[4]", 64, 4) == 48
