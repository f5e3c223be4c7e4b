# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml device.yaml --output-dir generated --impl-path numpy_kernels.py \
#     --backend-name numpy
# ruff: noqa: A001
"""Kernels of the operators under full_codegen: each hands its operator to the backend's `builtin`."""

from __future__ import annotations

from typing import Any, TypeAlias

from tarry.backends.generated import GeneratedBackend, Kernel

Number: TypeAlias = int | float | complex


def abs(backend: GeneratedBackend, self_: Any) -> Any:
    """abs(Tensor self) -> Tensor"""
    return backend.builtin("aten::abs", self_)


def div_tensor(backend: GeneratedBackend, self_: Any, other: Any) -> Any:
    """div.Tensor(Tensor self, Tensor other) -> Tensor"""
    return backend.builtin("aten::div.Tensor", self_, other)


def exp(backend: GeneratedBackend, self_: Any) -> Any:
    """exp(Tensor self) -> Tensor"""
    return backend.builtin("aten::exp", self_)


def log(backend: GeneratedBackend, self_: Any) -> Any:
    """log(Tensor self) -> Tensor"""
    return backend.builtin("aten::log", self_)


def maximum(backend: GeneratedBackend, self_: Any, other: Any) -> Any:
    """maximum(Tensor self, Tensor other) -> Tensor"""
    return backend.builtin("aten::maximum", self_, other)


def mm(backend: GeneratedBackend, self_: Any, mat2: Any) -> Any:
    """mm(Tensor self, Tensor mat2) -> Tensor"""
    return backend.builtin("aten::mm", self_, mat2)


def mul_tensor(backend: GeneratedBackend, self_: Any, other: Any) -> Any:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    return backend.builtin("aten::mul.Tensor", self_, other)


def ne_scalar(backend: GeneratedBackend, self_: Any, other: Number) -> Any:
    """ne.Scalar(Tensor self, Scalar other) -> Tensor"""
    return backend.builtin("aten::ne.Scalar", self_, other)


def neg(backend: GeneratedBackend, self_: Any) -> Any:
    """neg(Tensor self) -> Tensor"""
    return backend.builtin("aten::neg", self_)


def permute(backend: GeneratedBackend, self_: Any, dims: list[int]) -> Any:
    """permute(Tensor(a) self, int[] dims) -> Tensor(a)"""
    return backend.builtin("aten::permute", self_, dims)


def sqrt(backend: GeneratedBackend, self_: Any) -> Any:
    """sqrt(Tensor self) -> Tensor"""
    return backend.builtin("aten::sqrt", self_)


def tanh(backend: GeneratedBackend, self_: Any) -> Any:
    """tanh(Tensor self) -> Tensor"""
    return backend.builtin("aten::tanh", self_)


def unsqueeze(backend: GeneratedBackend, self_: Any, dim: int) -> Any:
    """unsqueeze(Tensor(a) self, int dim) -> Tensor(a)"""
    return backend.builtin("aten::unsqueeze", self_, dim)


def view(backend: GeneratedBackend, self_: Any, size: list[int]) -> Any:
    """view(Tensor(a) self, SymInt[] size) -> Tensor(a)"""
    return backend.builtin("aten::view", self_, size)


def where_self(backend: GeneratedBackend, condition: Any, self_: Any, other: Any) -> Any:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    return backend.builtin("aten::where.self", condition, self_, other)


KERNELS: dict[str, Kernel] = {
    "aten::abs": abs,
    "aten::div.Tensor": div_tensor,
    "aten::exp": exp,
    "aten::log": log,
    "aten::maximum": maximum,
    "aten::mm": mm,
    "aten::mul.Tensor": mul_tensor,
    "aten::ne.Scalar": ne_scalar,
    "aten::neg": neg,
    "aten::permute": permute,
    "aten::sqrt": sqrt,
    "aten::tanh": tanh,
    "aten::unsqueeze": unsqueeze,
    "aten::view": view,
    "aten::where.self": where_self,
}
"""The kernel of each operator."""
