# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml device.yaml --output-dir generated --impl-path numpy_kernels.py \
#     --backend-name numpy
"""Functions that you wrote, by operator."""

from __future__ import annotations

import numpy_kernels as kernels

from .declarations import HandWritten, Kernel

_: HandWritten = kernels  # the type checker compares them

WRITTEN: dict[str, Kernel] = {
    "aten::_to_copy": kernels._to_copy,
    "aten::add.Scalar": kernels.add_scalar,
    "aten::add.Tensor": kernels.add_tensor,
    "aten::addcdiv": kernels.addcdiv,
    "aten::addcmul": kernels.addcmul,
    "aten::addmm": kernels.addmm,
    "aten::amax": kernels.amax,
    "aten::clamp": kernels.clamp,
    "aten::clone": kernels.clone,
    "aten::div.Scalar": kernels.div_scalar,
    "aten::eq.Scalar": kernels.eq_scalar,
    "aten::fill.Scalar": kernels.fill_scalar,
    "aten::full": kernels.full,
    "aten::full_like": kernels.full_like,
    "aten::gather": kernels.gather,
    "aten::lerp.Scalar": kernels.lerp_scalar,
    "aten::mul.Scalar": kernels.mul_scalar,
    "aten::relu": kernels.relu,
    "aten::scalar_tensor": kernels.scalar_tensor,
    "aten::scatter.value": kernels.scatter_value,
    "aten::split_with_sizes_copy": kernels.split_with_sizes_copy,
    "aten::squeeze.dim": kernels.squeeze_dim,
    "aten::sub.Tensor": kernels.sub_tensor,
    "aten::sum": kernels.sum,
    "aten::sum.dim_IntList": kernels.sum_dim_intlist,
    "aten::threshold_backward": kernels.threshold_backward,
    "aten::zeros_like": kernels.zeros_like,
}
"""Kernels, from data to data."""

AUTOGRAD: dict[str, Kernel] = {
    "aten::hardtanh": kernels.hardtanh,
}
"""Autograd functions, from tensors to tensors."""
