# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml golden.yaml --output-dir expected --impl-path golden_kernels.py \
#     --backend-name golden --gen-ts-lowerings
# ruff: noqa: A002
"""Kernels of the operators under full_codegen: each hands its operator to the backend's `builtin`."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from tarry.backends.generated import GeneratedBackend, Kernel

Number: TypeAlias = int | float | complex


def add_tensor(backend: GeneratedBackend, self_: Any, other: Any, *, alpha: Number) -> Any:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return backend.builtin("aten::add.Tensor", self_, other, alpha=alpha)


def arange_start_step(
    backend: GeneratedBackend,
    start: Number,
    end: Number,
    step: Number,
    *,
    dtype: torch.dtype | None,
    layout: torch.layout | None,
    device: torch.device | None,
    pin_memory: bool | None,
) -> Any:
    """arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None, Layout? layout=None,
    Device? device=None, bool? pin_memory=None) -> Tensor. Also for arange.start_out."""
    return backend.builtin(
        "aten::arange.start_step", start, end, step, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory
    )


def bernoulli_p(backend: GeneratedBackend, self_: Any, p: float, *, generator: torch.Generator | None) -> Any:
    """bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor"""
    return backend.builtin("aten::bernoulli.p", self_, p, generator=generator)


def cat(backend: GeneratedBackend, tensors: list[Any], dim: int) -> Any:
    """cat(Tensor[] tensors, int dim=0) -> Tensor"""
    return backend.builtin("aten::cat", tensors, dim)


def max_dim(backend: GeneratedBackend, self_: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return backend.builtin("aten::max.dim", self_, dim, keepdim)


def native_layer_norm(
    backend: GeneratedBackend, input: Any, normalized_shape: list[int], weight: Any, bias: Any, eps: float
) -> tuple[Any, Any, Any]:
    """native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor,
    Tensor, Tensor)"""
    return backend.builtin("aten::native_layer_norm", input, normalized_shape, weight, bias, eps)


def split_copy_tensor(backend: GeneratedBackend, self_: Any, split_size: int, dim: int) -> list[Any]:
    """split_copy.Tensor(Tensor self, SymInt split_size, int dim=0) -> Tensor[]"""
    return backend.builtin("aten::split_copy.Tensor", self_, split_size, dim)


def view_copy(backend: GeneratedBackend, self_: Any, size: list[int]) -> Any:
    """view_copy(Tensor self, SymInt[] size) -> Tensor"""
    return backend.builtin("aten::view_copy", self_, size)


KERNELS: dict[str, Kernel] = {
    "aten::add.Tensor": add_tensor,
    "aten::arange.start_step": arange_start_step,
    "aten::bernoulli.p": bernoulli_p,
    "aten::cat": cat,
    "aten::max.dim": max_dim,
    "aten::native_layer_norm": native_layer_norm,
    "aten::split_copy.Tensor": split_copy_tensor,
    "aten::view": view_copy,
    "aten::view_copy": view_copy,
}
"""The kernel of each operator."""
