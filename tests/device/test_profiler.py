"""torch.profiler and torch.autograd.profiler: times that can be, and rows with the user's line."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import tarry
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

CALLS = 3
FILE = "test_profiler.py"


def train() -> int:
    """Some steps; gives the line of the optimizer."""
    model = torch.nn.Linear(8, 8).to("tarry")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(CALLS):
        optimizer.zero_grad()
        model(torch.ones(4, 8, device="tarry")).sum().backward()
        optimizer.step()
    return sys._getframe().f_lineno - 1


def rows(profile: Any) -> dict[str, Any]:
    found = {event.key: event for event in profile.key_averages()}
    for event in found.values():
        for name in ("cpu_time_total", "self_cpu_time_total", "device_time_total", "self_device_time_total"):
            assert getattr(event, name) >= 0, (event.key, name)
    return found


def test_device_time_is_that_of_steps_and_not_of_recording() -> None:
    with torch.autograd.profiler.profile(use_device="tarry") as profile:
        line = train()
    found = rows(profile)
    step, execute = found[f"tarry::step ({FILE}:{line})"], found[f"tarry::execute ({FILE}:{line})"]
    assert step.count == execute.count == CALLS
    assert 0 < execute.device_time_total <= step.cpu_time_total
    assert found["aten::linear"].device_time_total == 0  # it was only recorded
    kernel = found[f"tarry::kernel aten::mm ({FILE}:{line - 1})"]
    assert 0 < kernel.device_time_total <= execute.device_time_total
    assert kernel.count == CALLS


def test_a_fallback_has_device_time() -> None:
    x = torch.ones(1000, device="tarry")
    tarry.sync(x)
    with torch.autograd.profiler.profile(use_device="tarry") as profile:
        x.nonzero()
    assert rows(profile)["aten::nonzero"].device_time_total > 0


@pytest.mark.parametrize("activities", [None, [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]])
def test_kineto(activities: Any, tmp_path: Any) -> None:
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        line = train()
    assert rows(profile)[f"tarry::step ({FILE}:{line})"].count == CALLS
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    assert f"tarry::kernel aten::mm ({FILE}:{line - 1})" in (tmp_path / "trace.json").read_text()


def test_the_first_use_is_no_different_from_the_second() -> None:
    """What was pending before, and what is pending at the end, is in neither's way."""
    pending = torch.ones(3, device="tarry") + 1
    for _ in range(2):
        with torch.autograd.profiler.profile(use_device="tarry") as profile:
            left = torch.randn(3, device="tarry") * 2
        assert any(key.startswith("tarry::step") for key in rows(profile))
    assert pending.tolist() == [2, 2, 2]
    assert left.isfinite().all()


def test_compiles_and_their_kernels_are_rows() -> None:
    tarry.set_backend("torchscript", compile="wait")
    x = torch.ones(8, device="tarry")
    with torch.profiler.profile() as profile:
        assert (x.sin() + 1).sum().item() > 0
    found = rows(profile)
    (compiled,) = [key for key in found if key.startswith("tarry::compile")]
    assert re.fullmatch(rf"tarry::compile \({FILE}:\d+\)", compiled)


@pytest.mark.slow
def test_kernels_of_inductor_are_rows() -> None:
    tarry.set_backend("inductor", "cpu", compile="wait")
    x = torch.ones(64, 64, device="tarry")
    for _ in range(2):
        (x.sin() + 1).sum().item()
    with torch.profiler.profile() as profile:
        (x.sin() + 1).sum().item()
    assert any(key.startswith("tarry::kernel cpp_fused") for key in rows(profile))
