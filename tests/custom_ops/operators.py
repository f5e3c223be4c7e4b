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


def multiply_(slope: float = 1.0) -> CustomOp:
    """x *= y in place; returns the sum of the new x. The gradients are right if `slope` is 1."""

    @tarry.custom_op("optest::multiply_", mutates_args=("x",), exist_ok=True)
    def multiply_(x: Tensor, y: Tensor) -> Tensor: ...

    @multiply_.impl()
    def _(x, y):
        return x.mul_(y).sum()

    multiply_.impl_abstract()(lambda x, y: x.new_empty(()))
    multiply_.impl_save_for_backward()(lambda inputs, output: (inputs.x, inputs.y))

    @multiply_.impl_backward()
    def _(ctx, saved, grad_sum, grad_x):
        x, y = saved
        return {"x": (grad_x + grad_sum) * y, "y": (grad_x + grad_sum) * x * slope}

    return multiply_


def scaled_pair() -> CustomOp:
    """Takes a list, gives two results of which one has no gradient."""

    @tarry.custom_op("optest::scaled_pair", exist_ok=True)
    def scaled_pair(xs: list[Tensor], scale: float) -> tuple[Tensor, Tensor]: ...

    @scaled_pair.impl()
    def _(xs, scale):
        return xs[0] * xs[1] * scale, xs[0].argsort()

    @scaled_pair.impl_abstract()
    def _(xs, scale):
        return torch.empty_like(xs[0]), xs[0].new_empty(xs[0].shape, dtype=torch.int64)

    scaled_pair.impl_save_for_backward()(lambda inputs, output: (inputs.xs, inputs.scale))

    @scaled_pair.impl_backward([True, False])
    def _(ctx, saved, grad, _):
        (x, y), scale = saved
        return {"xs": [grad * y * scale, grad * x * scale]}

    return scaled_pair
