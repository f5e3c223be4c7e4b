"""Nothing is kept that the program let go."""

from __future__ import annotations

import gc
import resource
import weakref

import pytest
import torch
from torch import nn

from tests.support import DEVICE, dev, step

USES_DEVICE = True


def _resident() -> int:
    """Resident pages now, in bytes (the peak would not come down again)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _growth(steps: int, warm: int) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64)).to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    base = 0
    for i in range(steps):
        x = dev(torch.full((32, 64), float(i % 5)))
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        if i % 50 == 0:
            loss.item()
        if i == warm:
            gc.collect()
            base = _resident()
    gc.collect()
    return (_resident() - base) / (steps - warm)


def test_training_does_not_leak() -> None:
    assert _growth(steps=400, warm=200) < 4096, "bytes of growth for each step"


@pytest.mark.slow
def test_training_does_not_leak_in_the_long_run() -> None:
    assert _growth(steps=4000, warm=1000) < 512, "bytes of growth for each step"


def test_recording_and_dropping_does_not_leak() -> None:
    x = dev(torch.ones(64, 64))
    step()
    base = 0
    for i in range(3000):
        y = x * i
        y[0].add_(1)
        z = y.t() @ y
        del y, z
        if i == 1000:
            step()
            base = _resident()
    step()
    assert (_resident() - base) / 2000 < 1024, "bytes of growth for each dropped chain"


def test_storages_die_with_their_tensors() -> None:
    big = [torch.ones(1 << 20, device=DEVICE) + 1 for _ in range(2)]
    step()
    big[0].sum().item()
    before = _resident()
    for _ in range(30):
        t = torch.ones(1 << 20, device=DEVICE) + 2
        t.sum().item()
        del t
    assert _resident() - before < 40 << 20


def test_python_objects_die_too() -> None:
    net = nn.Linear(4, 4).to(DEVICE)
    out = net(dev(torch.ones(2, 4)))
    out.sum().backward()
    ref = weakref.ref(net)
    grad = weakref.ref(net.weight.grad)
    del net, out
    gc.collect()
    assert ref() is None
    assert grad() is None
