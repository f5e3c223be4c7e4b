# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml golden.yaml --output-dir expected --impl-path golden_kernels.py \
#     --backend-name golden --gen-ts-lowerings
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

    def addmm(self, self_: Any, mat1: Any, mat2: Any, /, *, beta: Number, alpha: Number) -> Any:
        """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
        ...

    def clamp(self, self_: Any, min: Number | None, max: Number | None, /) -> Any:
        """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
        ...

    def copy(self, self_: Any, src: Any, non_blocking: bool, /) -> Any:
        """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor. Also for copy_."""
        ...

    def fill_scalar(self, self_: Any, value: Number, /) -> Any:
        """fill.Scalar(Tensor self, Scalar value) -> Tensor. Also for fill_.Scalar."""
        ...

    def index_tensor(self, self_: Any, indices: list[Any], /) -> Any:
        """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"""
        ...

    def unbind_copy_int(self, self_: Any, dim: int, /) -> list[Any]:
        """unbind_copy.int(Tensor self, int dim=0) -> Tensor[]"""
        ...

    def max_pool3d(
        self,
        self_: torch.Tensor,
        kernel_size: list[int],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        ceil_mode: bool,
        /,
    ) -> torch.Tensor:
        """max_pool3d(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, int[3] dilation=1, bool
        ceil_mode=False) -> Tensor"""
        ...
