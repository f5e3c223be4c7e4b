# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml device.yaml --output-dir generated --impl-path numpy_kernels.py \
#     --backend-name numpy
# ruff: noqa: A002
"""Functions that you write: a type checker compares your module with this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

Kernel: TypeAlias = Callable[..., Any]
Number: TypeAlias = int | float | complex


class HandWritten(Protocol):
    """Kernels take and return the backend's data, autograd functions take and return tensors."""

    def _to_copy(
        self,
        self_: Any,
        /,
        *,
        dtype: torch.dtype | None,
        layout: torch.layout | None,
        device: torch.device | None,
        pin_memory: bool | None,
        non_blocking: bool,
        memory_format: torch.memory_format | None,
    ) -> Any:
        """_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool?
        pin_memory=None, bool non_blocking=False, MemoryFormat? memory_format=None) -> Tensor"""
        ...

    def add_scalar(self, self_: Any, other: Number, alpha: Number, /) -> Any:
        """add.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
        ...

    def add_tensor(self, self_: Any, other: Any, /, *, alpha: Number) -> Any:
        """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
        ...

    def addcdiv(self, self_: Any, tensor1: Any, tensor2: Any, /, *, value: Number) -> Any:
        """addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
        ...

    def addcmul(self, self_: Any, tensor1: Any, tensor2: Any, /, *, value: Number) -> Any:
        """addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
        ...

    def addmm(self, self_: Any, mat1: Any, mat2: Any, /, *, beta: Number, alpha: Number) -> Any:
        """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
        ...

    def amax(self, self_: Any, dim: list[int], keepdim: bool, /) -> Any:
        """amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
        ...

    def clamp(self, self_: Any, min: Number | None, max: Number | None, /) -> Any:
        """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
        ...

    def clone(self, self_: Any, /, *, memory_format: torch.memory_format | None) -> Any:
        """clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor"""
        ...

    def div_scalar(self, self_: Any, other: Number, /) -> Any:
        """div.Scalar(Tensor self, Scalar other) -> Tensor"""
        ...

    def eq_scalar(self, self_: Any, other: Number, /) -> Any:
        """eq.Scalar(Tensor self, Scalar other) -> Tensor"""
        ...

    def fill_scalar(self, self_: Any, value: Number, /) -> Any:
        """fill.Scalar(Tensor self, Scalar value) -> Tensor. Also for fill_.Scalar."""
        ...

    def full(
        self,
        size: list[int],
        fill_value: Number,
        /,
        *,
        dtype: torch.dtype | None,
        layout: torch.layout | None,
        device: torch.device | None,
        pin_memory: bool | None,
    ) -> Any:
        """full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,
        bool? pin_memory=None) -> Tensor"""
        ...

    def full_like(
        self,
        self_: Any,
        fill_value: Number,
        /,
        *,
        dtype: torch.dtype | None,
        layout: torch.layout | None,
        device: torch.device | None,
        pin_memory: bool | None,
        memory_format: torch.memory_format | None,
    ) -> Any:
        """full_like(Tensor self, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device?
        device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"""
        ...

    def gather(self, self_: Any, dim: int, index: Any, /, *, sparse_grad: bool) -> Any:
        """gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"""
        ...

    def lerp_scalar(self, self_: Any, end: Any, weight: Number, /) -> Any:
        """lerp.Scalar(Tensor self, Tensor end, Scalar weight) -> Tensor"""
        ...

    def mul_scalar(self, self_: Any, other: Number, /) -> Any:
        """mul.Scalar(Tensor self, Scalar other) -> Tensor"""
        ...

    def relu(self, self_: Any, /) -> Any:
        """relu(Tensor self) -> Tensor"""
        ...

    def scalar_tensor(
        self,
        s: Number,
        /,
        *,
        dtype: torch.dtype | None,
        layout: torch.layout | None,
        device: torch.device | None,
        pin_memory: bool | None,
    ) -> Any:
        """scalar_tensor(Scalar s, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool?
        pin_memory=None) -> Tensor"""
        ...

    def scatter_value(self, self_: Any, dim: int, index: Any, value: Number, /) -> Any:
        """scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
        ...

    def split_with_sizes_copy(self, self_: Any, split_sizes: list[int], dim: int, /) -> list[Any]:
        """split_with_sizes_copy(Tensor self, SymInt[] split_sizes, int dim=0) -> Tensor[]"""
        ...

    def squeeze_dim(self, self_: Any, dim: int, /) -> Any:
        """squeeze.dim(Tensor(a) self, int dim) -> Tensor(a)"""
        ...

    def sub_tensor(self, self_: Any, other: Any, /, *, alpha: Number) -> Any:
        """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
        ...

    def sum(self, self_: Any, /, *, dtype: torch.dtype | None) -> Any:
        """sum(Tensor self, *, ScalarType? dtype=None) -> Tensor"""
        ...

    def sum_dim_intlist(self, self_: Any, dim: list[int] | None, keepdim: bool, /, *, dtype: torch.dtype | None) -> Any:
        """sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
        ...

    def threshold_backward(self, grad_output: Any, self_: Any, threshold: Number, /) -> Any:
        """threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor"""
        ...

    def zeros_like(
        self,
        self_: Any,
        /,
        *,
        dtype: torch.dtype | None,
        layout: torch.layout | None,
        device: torch.device | None,
        pin_memory: bool | None,
        memory_format: torch.memory_format | None,
    ) -> Any:
        """zeros_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool?
        pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"""
        ...

    def hardtanh(self, self_: torch.Tensor, min_val: Number, max_val: Number, /) -> torch.Tensor:
        """hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor"""
        ...
