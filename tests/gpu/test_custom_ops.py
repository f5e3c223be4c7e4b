"""Custom operators with Triton kernels: called on CUDA tensors, recorded on tarry, lowered for a backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tarry
from tarry.custom_ops import CustomOp
from tests.support import fallbacks

pytestmark = pytest.mark.gpu
triton = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")


@triton.jit
def gelu_add_kernel(x, y, out, count, BLOCK: tl.constexpr):  # noqa: N803 - Triton's way of writing constants
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    v = tl.load(x + offsets, inside) + tl.load(y + offsets, inside)
    tl.store(out + offsets, 0.5 * v * (1.0 + tl.erf(v * 0.70710678)), inside)


def launch(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    gelu_add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    return out


@pytest.fixture(params=["eager", "torchscript", "inductor"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    tarry.set_backend(request.param, device="cuda")
    yield request.param
    tarry.set_backend("eager", device="cpu")


@pytest.fixture
def gelu_add() -> Iterator[CustomOp]:
    @tarry.custom_op("gputest::gelu_add")
    def gelu_add(x: Tensor, y: Tensor) -> Tensor: ...

    gelu_add.impl("cuda")(launch)
    gelu_add.impl_abstract()(lambda x, y: torch.empty_like(x, memory_format=torch.contiguous_format))
    gelu_add.impl_save_for_backward()(lambda inputs, output: inputs.x + inputs.y)

    @gelu_add.impl_backward()
    def _(ctx, saved, grad):
        slope = torch.ops.aten.gelu_backward(grad, saved)
        return {"x": slope, "y": slope}

    yield gelu_add
    gelu_add.remove()


def _expected(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x + y)


def test_called(gelu_add: CustomOp) -> None:
    x, y = torch.randn(2, 1000, device="cuda")
    torch.testing.assert_close(gelu_add(x, y), _expected(x, y), rtol=1e-5, atol=1e-5)


def test_recorded_with_its_gradient(gelu_add: CustomOp, backend: str) -> None:
    x, y = torch.randn(2, 1000)
    lazy = x.to("tarry").requires_grad_()
    tarry.metrics.reset()
    result = gelu_add(lazy * 1.0, y.to("tarry"))
    result.sum().backward()
    torch.testing.assert_close(result.detach().cpu(), _expected(x, y), rtol=1e-4, atol=1e-5)
    x.requires_grad_()
    _expected(x, y).sum().backward()
    assert lazy.grad is not None
    torch.testing.assert_close(lazy.grad.cpu(), x.grad, rtol=1e-4, atol=1e-5)
    assert not fallbacks()


def test_a_kernel_for_one_backend(gelu_add: CustomOp) -> None:
    tarry.set_backend("inductor", device="cuda")
    calls = []

    @gelu_add.lower("inductor", kernel=True)
    def _(x, y):
        calls.append(x.device.type)
        return launch(x, y)

    try:
        x, y = torch.randn(2, 1000)
        result = gelu_add(x.to("tarry"), y.to("tarry")) + 1
        torch.testing.assert_close(result.cpu(), _expected(x, y) + 1, rtol=1e-4, atol=1e-5)
        assert calls == ["cuda"]
    finally:
        tarry.set_backend("eager", device="cpu")


def test_a_kernel_that_returns_its_result_elsewhere_is_found(backend: str) -> None:
    @tarry.custom_op("gputest::lost", exist_ok=True)
    def lost(x: Tensor) -> Tensor: ...

    lost.impl("cuda")(lambda x: x.cpu())
    lost.impl_abstract()(torch.empty_like)
    with pytest.raises(AssertionError, match="promised on device cuda:0 and made on cpu"):
        lost.check(torch.ones(3, device="cuda"))
    lost.remove()


def test_checked(gelu_add: CustomOp, backend: str) -> None:
    gelu_add.impl("cpu")(_expected)
    with torch.no_grad():
        gelu_add._formula = None  # PyTorch has no backward over CUDA tensors in a process with a custom device
        gelu_add.check(*torch.randn(2, 64, device="cuda"))
