"""What golden.yaml asks for."""

from __future__ import annotations

from typing import Any

import torch


def addmm(self: Any, mat1: Any, mat2: Any, *, beta: Any, alpha: Any) -> Any:
    return torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha)


def clamp(self: Any, min: Any, max: Any) -> Any:  # noqa: A002
    return torch.clamp(self, min, max)


def copy(self: Any, src: Any, non_blocking: bool) -> Any:
    return src.to(self.dtype).expand_as(self).clone()


def fill_scalar(self: Any, value: Any) -> Any:
    return torch.full_like(self, value)


def index_tensor(self: Any, indices: list[Any]) -> Any:
    return torch.ops.aten.index.Tensor(self, indices)


def unbind_copy_int(self: Any, dim: int) -> list[Any]:
    return [part.clone() for part in self.unbind(dim)]


def relu(self: Any) -> Any:
    """Listed under full_codegen as relu_: the author's own kernel is used all the same."""
    return self.clamp(min=0)


def max_pool3d(
    self: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> torch.Tensor:
    return self
