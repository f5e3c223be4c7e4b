# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml golden.yaml --output-dir expected --impl-path golden_kernels.py \
#     --backend-name golden --gen-ts-lowerings
# ruff: noqa: A002
"""Shape functions of operators that torchgen knows no meta kernel of. To write them yourself, copy this file and pass
it with --shape-inference-path."""

from __future__ import annotations

import torch

from tarry.ir import typed as t
from tarry.ir.infer import infer_types


def compute_shape_arange_start_out(
    start: t.Scalar, end: t.Scalar, step: t.Scalar = 1, *, out: t.TensorType
) -> t.Shapes:
    """arange.start_out(Scalar start, Scalar end, Scalar step=1, *, Tensor(a!) out) -> Tensor(a!)"""
    return infer_types("aten::arange.start_out", (start, end, step, out))


def compute_shape_bernoulli_p(self_: t.TensorType, p: t.Float, *, generator: t.Generator | None = None) -> t.Shapes:
    """bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor"""
    return infer_types("aten::bernoulli.p", (self_, p, generator))


def compute_shape_native_layer_norm(
    input: t.TensorType,
    normalized_shape: tuple[int, ...],
    weight: t.TensorType | None,
    bias: t.TensorType | None,
    eps: t.Float,
) -> t.Shapes:
    """native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor,
    Tensor, Tensor)"""
    return infer_types("aten::native_layer_norm", (input, normalized_shape, weight, bias, eps))


def compute_shape_relu_(self_: t.TensorType) -> t.Shapes:
    """relu_(Tensor(a!) self) -> Tensor(a!)"""
    return infer_types("aten::relu_", (self_,))


def compute_shape_scalar(value: t.Scalar, type: torch.dtype) -> t.Shapes:
    """scalar(Scalar value, ScalarType type) -> Tensor"""
    raise NotImplementedError("write compute_shape_scalar")


def compute_shape_narrow_view(
    input: t.TensorType, start: int, end: int | None, *, sizes: tuple[int, ...] = ()
) -> t.Shapes:
    """narrow_view(Tensor input, SymInt start, SymInt? end, *, int[2] sizes=[]) -> Tensor"""
    raise NotImplementedError("write compute_shape_narrow_view")
