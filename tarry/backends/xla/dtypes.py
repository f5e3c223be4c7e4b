"""PyTorch's dtypes in JAX, and PyTorch's rules for the dtype that an operator computes in.

JAX promotes by rules of its own (a float64 scalar array makes a float32 array float64), so lowerings never rely on
them: operands are cast before, results after.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch

from tarry.ir.graph import Number, Value

JAX_DTYPES: dict[torch.dtype, Any] = {
    torch.bool: jnp.bool_,
    torch.uint8: jnp.uint8,
    torch.int8: jnp.int8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.int64: jnp.int64,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
}
"""The dtypes that programs may have. A node with any other is left to the real device."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ATen's kernels compute: 16-bit floats are widened, and rounded once at the end."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def promoted(*operands: Any) -> torch.dtype:
    """The dtype that two arguments of a node meet in, by PyTorch's rules: tensors, then 0-dim tensors, then numbers."""
    return torch.result_type(*(_sample(operand) for operand in operands))


_SAMPLES = {torch.bool: True, torch.int64: 1, torch.float64: 1.0, torch.complex128: 1j}


def _sample(operand: Any) -> Any:
    if isinstance(operand, Value):
        return torch.empty((1,) if operand.type.sizes else (), dtype=operand.type.dtype, device="meta")
    return _SAMPLES[operand.dtype] if isinstance(operand, Number) else operand
