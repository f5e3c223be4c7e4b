"""Mixed precision: autocast is not silently a no-op, and gradients are scaled as on other devices."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import DEVICE, assert_same, dev, step, tarry_only

USES_DEVICE = True

LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_matrix_products_run_low_and_the_rest_high(dtype: torch.dtype) -> None:
    x, w = dev(torch.randn(4, 4)), dev(torch.randn(4, 4))
    with torch.autocast(DEVICE, dtype=dtype):
        assert (x @ w).dtype == dtype
        assert F.linear(x, w).dtype == dtype
        assert torch.bmm(x[None], w[None]).dtype == dtype
        assert F.conv2d(dev(torch.randn(1, 2, 4, 4)), dev(torch.randn(3, 2, 2, 2))).dtype == dtype
        assert (x + w).dtype == torch.float32, "pointwise operators are left alone"
        if DEVICE != "cpu":  # the CPU's own list is shorter
            assert F.softmax(x @ w, -1).dtype == torch.float32
            assert F.layer_norm((x @ w), (4,)).dtype == torch.float32
        assert F.mse_loss((x @ w), w).dtype == torch.float32
        assert (x.to(dtype) + x).dtype == torch.float32, "mixed operands widen"
        with torch.autocast(DEVICE, enabled=False):
            assert (x @ w).dtype == torch.float32
    assert (x @ w).dtype == torch.float32


def test_queries_of_the_state() -> None:
    assert not torch.is_autocast_enabled(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.is_autocast_enabled(DEVICE)
        assert torch.get_autocast_dtype(DEVICE) == torch.bfloat16
    assert torch.amp.is_autocast_available(DEVICE)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_training_under_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    here = copy.deepcopy(host).to(DEVICE)
    for net, device in ((host, "cpu"), (here, DEVICE)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for i in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).to(device)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=dtype):
                loss = net(x).float().square().mean()
            loss.backward()
            optimizer.step()
    for name, value in host.state_dict().items():
        torch.testing.assert_close(here.state_dict()[name].cpu(), value, rtol=2e-2, atol=2e-2)
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in here.parameters())


@tarry_only
def test_grad_scaler_scales_and_unscales() -> None:
    w = dev(torch.tensor([2.0])).requires_grad_()
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=1)
    loss = (w * 3).sum()
    scaler.scale(loss).backward()
    assert_same(w.grad, torch.tensor([24.0]))
    scaler.unscale_(optimizer)
    assert_same(w.grad, torch.tensor([3.0]))
    scaler.step(optimizer)
    scaler.update()
    assert_same(w, torch.tensor([-1.0]))
    assert scaler.get_scale() == 16.0


@tarry_only
def test_grad_scaler_skips_a_step_that_overflowed() -> None:
    w = dev(torch.tensor([2.0])).requires_grad_()
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    scaler.scale((w * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same(w, torch.tensor([2.0]))
    assert scaler.get_scale() == 4.0
    state = scaler.state_dict()
    torch.amp.GradScaler(DEVICE).load_state_dict(state)


def test_custom_functions_know_autocast() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=DEVICE, cast_inputs=torch.float32)
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x @ y

        @staticmethod
        @torch.amp.custom_bwd(device_type=DEVICE)
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad @ y.t(), x.t() @ grad

    x = dev(torch.randn(2, 2)).requires_grad_()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = Product.apply(x, x)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert x.grad is not None


def test_the_cache_of_casts_does_not_outlive_an_update() -> None:
    w = dev(torch.ones(2, 2)).requires_grad_()
    x = dev(torch.ones(1, 2))
    for expected in (2.0, 4.0):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = x @ w
        step()
        assert out.float().max().item() == expected
        with torch.no_grad():
            w.mul_(2)
