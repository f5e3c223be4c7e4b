# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml device.yaml --output-dir generated --impl-path numpy_kernels.py \
#     --backend-name numpy
"""Shape functions of operators that torchgen knows no meta kernel of. To write them yourself, copy this file and pass
it with --shape-inference-path."""

from __future__ import annotations

from tarry.ir import typed as t
from tarry.ir.infer import infer_types


def compute_shape_abs(self_: t.TensorType) -> t.Shapes:
    """abs(Tensor self) -> Tensor"""
    return infer_types("aten::abs", (self_,))


def compute_shape_permute(self_: t.TensorType, dims: tuple[int, ...]) -> t.Shapes:
    """permute(Tensor(a) self, int[] dims) -> Tensor(a)"""
    return infer_types("aten::permute", (self_, dims))


def compute_shape_unsqueeze(self_: t.TensorType, dim: int) -> t.Shapes:
    """unsqueeze(Tensor(a) self, int dim) -> Tensor(a)"""
    return infer_types("aten::unsqueeze", (self_, dim))


def compute_shape_view(self_: t.TensorType, size: tuple[int, ...]) -> t.Shapes:
    """view(Tensor(a) self, SymInt[] size) -> Tensor(a)"""
    return infer_types("aten::view", (self_, size))


def compute_shape_where_self(condition: t.TensorType, self_: t.TensorType, other: t.TensorType) -> t.Shapes:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    return infer_types("aten::where.self", (condition, self_, other))
