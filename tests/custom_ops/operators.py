"""Operators that several tests use."""

from __future__ import annotations

import torch
from torch import Tensor

import tarry
from tarry.custom_ops import CustomOp

BACKENDS = ("eager", "torchscript", "inductor")


def cube() -> CustomOp:
    """x**3 with all that an operator can have: kernel, abstract implementation, gradient."""

    @tarry.custom_op("optest::cube", exist_ok=True)
    def cube(x: Tensor) -> Tensor: ...

    @cube.impl()
    def _(x):
        return torch.from_numpy(x.detach().numpy().reshape(x.shape) ** 3).reshape(x.shape) if x.dim() else x**3

    @cube.impl_abstract()
    def _(x):
        return torch.empty_like(x)

    @cube.impl_save_for_backward()
    def _(inputs, output):
        return inputs.x

    @cube.impl_backward()
    def _(ctx, saved, grad):
        return {"x": grad * 3 * saved**2}

    return cube


def axpy_() -> CustomOp:
    """y += a * x, in place, with nothing returned."""

    @tarry.custom_op("optest::axpy_", mutates_args=("y",), exist_ok=True)
    def axpy_(x: Tensor, y: Tensor, a: float) -> None: ...

    @axpy_.impl()
    def _(x, y, a):
        y.add_(x, alpha=a)

    @axpy_.impl_abstract()
    def _(x, y, a):
        return None

    return axpy_


def diagonal() -> CustomOp:
    """A view of its argument."""

    @tarry.custom_op("optest::diagonal", "(Tensor(a) x) -> Tensor(a)", exist_ok=True)
    def diagonal(x): ...

    @diagonal.impl()
    def _(x):
        return x.diagonal()

    @diagonal.impl_abstract()
    def _(x):
        return x.diagonal()

    return diagonal
