"""The functions that device.yaml asks for: from NumPy arrays to NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def add_scalar(self: Any, other: Any, alpha: Any) -> Any:
    return self + alpha * other


def add_tensor(self: Any, other: Any, *, alpha: Any) -> Any:
    return self + alpha * other


def sub_tensor(self: Any, other: Any, *, alpha: Any) -> Any:
    return self - alpha * other


def mul_scalar(self: Any, other: Any) -> Any:
    return self * other


def div_scalar(self: Any, other: Any) -> Any:
    return self / other


def addcdiv(self: Any, tensor1: Any, tensor2: Any, *, value: Any) -> Any:
    return self + value * tensor1 / tensor2


def addcmul(self: Any, tensor1: Any, tensor2: Any, *, value: Any) -> Any:
    return self + value * tensor1 * tensor2


def addmm(self: Any, mat1: Any, mat2: Any, *, beta: Any, alpha: Any) -> Any:
    return (beta * self if beta else 0) + alpha * (mat1 @ mat2)


def lerp_scalar(self: Any, end: Any, weight: Any) -> Any:
    return self + weight * (end - self)


def eq_scalar(self: Any, other: Any) -> Any:
    return self == other


def relu(self: Any) -> Any:
    return np.maximum(self, 0)


def threshold_backward(grad_output: Any, self: Any, threshold: Any) -> Any:
    return np.where(self <= threshold, 0, grad_output)


def clamp(self: Any, min: Any, max: Any) -> Any:  # noqa: A002 - the operator's arguments
    return np.clip(self, min, max)


# ---- reductions


def _axes(x: Any, dim: list[int] | None) -> tuple[int, ...] | None:
    return tuple(dim) if dim and x.ndim else None


def amax(self: Any, dim: list[int], keepdim: bool) -> Any:
    return self.max(_axes(self, dim), keepdims=keepdim)


def sum(self: Any, *, dtype: torch.dtype | None) -> Any:  # noqa: A001 - the operator's name
    return self.sum()


def sum_dim_intlist(self: Any, dim: list[int] | None, keepdim: bool, *, dtype: torch.dtype | None) -> Any:
    return self.sum(_axes(self, dim), keepdims=keepdim)


# ---- indices


def _places(index: Any, dim: int) -> tuple[Any, ...]:
    """Where an index along one dimension points to."""
    return tuple(index if d == dim % index.ndim else i for d, i in enumerate(np.indices(index.shape, sparse=True)))


def gather(self: Any, dim: int, index: Any, *, sparse_grad: bool) -> Any:
    return self[_places(index, dim)]


def scatter_value(self: Any, dim: int, index: Any, value: Any) -> Any:
    made = self.copy()
    made[_places(index, dim)] = value
    return made


# ---- making and copying


def _to_copy(
    self: Any, *, dtype: Any, layout: Any, device: Any, pin_memory: Any, non_blocking: bool, memory_format: Any
) -> Any:
    return self.copy()


def clone(self: Any, *, memory_format: Any) -> Any:
    return self.copy()


def fill_scalar(self: Any, value: Any) -> Any:
    return np.full_like(self, value)


def full(size: list[int], fill_value: Any, *, dtype: Any, layout: Any, device: Any, pin_memory: Any) -> Any:
    return np.full(size, fill_value)


def full_like(
    self: Any, fill_value: Any, *, dtype: Any, layout: Any, device: Any, pin_memory: Any, memory_format: Any
) -> Any:
    return np.full(self.shape, fill_value)


def scalar_tensor(s: Any, *, dtype: Any, layout: Any, device: Any, pin_memory: Any) -> Any:
    return np.asarray(s)


def zeros_like(self: Any, *, dtype: Any, layout: Any, device: Any, pin_memory: Any, memory_format: Any) -> Any:
    return np.zeros_like(self)


def split_with_sizes_copy(self: Any, split_sizes: list[int], dim: int) -> list[Any]:
    return [part.copy() for part in np.split(self, np.cumsum(split_sizes)[:-1], axis=dim)]


def squeeze_dim(self: Any, dim: int) -> Any:
    return self.squeeze(dim) if self.ndim and self.shape[dim] == 1 else self


# ---- autograd: from tensors to tensors


class _StraightThrough(torch.autograd.Function):
    """hardtanh whose gradient does not vanish outside the range."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.clamp(x, low, high)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None


def hardtanh(self: torch.Tensor, min_val: Any, max_val: Any) -> torch.Tensor:
    return _StraightThrough.apply(self, min_val, max_val)
