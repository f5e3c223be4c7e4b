# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml golden.yaml --output-dir expected --impl-path golden_kernels.py \
#     --backend-name golden --gen-ts-lowerings
"""Functions that you wrote, by operator."""

from __future__ import annotations

import golden_kernels as kernels

from .declarations import HandWritten, Kernel

_: HandWritten = kernels  # the type checker compares them

WRITTEN: dict[str, Kernel] = {
    "aten::addmm": kernels.addmm,
    "aten::clamp": kernels.clamp,
    "aten::copy": kernels.copy,
    "aten::fill.Scalar": kernels.fill_scalar,
    "aten::index.Tensor": kernels.index_tensor,
    "aten::relu": kernels.relu,
    "aten::unbind_copy.int": kernels.unbind_copy_int,
}
"""Kernels, from data to data."""

AUTOGRAD: dict[str, Kernel] = {
    "aten::max_pool3d": kernels.max_pool3d,
}
"""Autograd functions, from tensors to tensors."""
