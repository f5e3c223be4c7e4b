"""Operators that go element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tarry.backends.xla.dtypes import JAX_DTYPES, promoted
from tarry.backends.xla.table import (
    Array,
    Call,
    Compute,
    as_bool,
    cast,
    in_operand,
    in_promoted,
    in_result,
    lowers,
    pointwise,
)
from tarry.ir.graph import Node

# ---- one operand


def _sign(x: Array) -> Array:
    return jnp.where(jnp.isnan(x), 0, jnp.sign(x)) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.sign(x)


def _round(x: Array) -> Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _float_only(function: Any) -> Any:
    """Rounding leaves integers as they are."""
    return lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


pointwise(
    in_result,
    {
        "aten::acos": jnp.arccos,
        "aten::acosh": jnp.arccosh,
        "aten::asin": jnp.arcsin,
        "aten::asinh": jnp.arcsinh,
        "aten::atan": jnp.arctan,
        "aten::atanh": jnp.arctanh,
        "aten::bitwise_not": jnp.bitwise_not,
        "aten::ceil": _float_only(jnp.ceil),
        "aten::conj_physical": jnp.conj,
        "aten::cos": jnp.cos,
        "aten::cosh": jnp.cosh,
        "aten::erf": lax.erf,
        "aten::erfc": lax.erfc,
        "aten::exp": jnp.exp,
        "aten::exp2": jnp.exp2,
        "aten::expm1": jnp.expm1,
        "aten::floor": _float_only(jnp.floor),
        "aten::log": jnp.log,
        "aten::log10": jnp.log10,
        "aten::log1p": jnp.log1p,
        "aten::log2": jnp.log2,
        "aten::neg": jnp.negative,
        "aten::reciprocal": lambda x: 1 / x,
        "aten::relu": lambda x: jnp.maximum(x, 0),
        "aten::round": _round,
        "aten::rsqrt": lax.rsqrt,
        "aten::sigmoid": jax.nn.sigmoid,
        "aten::sign": _sign,
        "aten::sin": jnp.sin,
        "aten::sinh": jnp.sinh,
        "aten::sqrt": jnp.sqrt,
        "aten::tan": jnp.tan,
        "aten::tanh": jnp.tanh,
        "aten::trunc": _float_only(jnp.trunc),
    },
)
pointwise(
    in_operand,
    {
        "aten::abs": jnp.abs,
        "aten::isinf": jnp.isinf,
        "aten::isnan": jnp.isnan,
    },
)

# ---- two operands: with a tensor, or with a number


def _add(x: Array, y: Array, alpha: Array) -> Array:
    return x + alpha * y


def _subtract(x: Array, y: Array, alpha: Array) -> Array:
    return x - alpha * y


def _with_tensor_or_number(compute: Compute, functions: Mapping[str, Callable[..., Any]], **options: Any) -> None:
    """Register operators that have both forms."""
    for form in ("Tensor", "Scalar"):
        pointwise(compute, {f"aten::{name}.{form}": function for name, function in functions.items()}, **options)


def _meets_in_known_dtype(node: Node) -> bool:
    """A float16 tensor and a complex number do not."""
    return promoted(*node.args[:2]) in JAX_DTYPES


_with_tensor_or_number(
    in_result,
    {
        "add": _add,
        "bitwise_and": jnp.bitwise_and,
        "bitwise_or": jnp.bitwise_or,
        "bitwise_xor": jnp.bitwise_xor,
        "div": jnp.divide,
        "mul": jnp.multiply,
        "rsub": lambda x, y, alpha: _subtract(y, x, alpha),
        "sub": _subtract,
    },
)
_with_tensor_or_number(
    in_promoted,
    {
        "eq": jnp.equal,
        "ge": jnp.greater_equal,
        "gt": jnp.greater,
        "le": jnp.less_equal,
        "lt": jnp.less,
        "ne": jnp.not_equal,
    },
    when=_meets_in_known_dtype,
)

pointwise(
    in_result,
    {
        "aten::atan2": jnp.arctan2,
        "aten::fmax": jnp.fmax,
        "aten::fmin": jnp.fmin,
        "aten::hypot": jnp.hypot,
        "aten::maximum": jnp.maximum,
        "aten::minimum": jnp.minimum,
    },
)
pointwise(
    as_bool,
    {
        "aten::logical_and": jnp.logical_and,
        "aten::logical_not": jnp.logical_not,
        "aten::logical_or": jnp.logical_or,
        "aten::logical_xor": jnp.logical_xor,
    },
)


def _floor_divide(x: Array, y: Array) -> Array:
    """As ATen does it for floats: exact where the quotient is a whole number, x / y where y is zero."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.floor_divide(x, y)
    rest = lax.rem(x, y)
    quotient = (x - rest) / y
    quotient = jnp.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    whole = jnp.floor(quotient)
    whole = jnp.where(quotient - whole > 0.5, whole + 1, whole)
    whole = jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(x), x / y), whole)
    return jnp.where(y == 0, x / y, whole)


def _truncate_divide(x: Array, y: Array) -> Array:
    return jnp.trunc(x / y) if jnp.issubdtype(x.dtype, jnp.floating) else lax.div(*jnp.broadcast_arrays(x, y))


_DIVISIONS = {None: jnp.divide, "floor": _floor_divide, "trunc": _truncate_divide}


def _whole_operands(call: Call, x: Array, y: Array) -> tuple[Array, Array]:
    """The operands of a division in their common dtype. Whole numbers must not be divided by zero."""
    x, y = cast(x, call.wide), cast(y, call.wide)
    if jnp.issubdtype(x.dtype, jnp.integer):
        call.require(y != 0)
    return x, y


@lowers("aten::div.Tensor_mode", "aten::div.Scalar_mode")
def _divide(call: Call, x: Array, y: Array, mode: str | None) -> Array:
    return _DIVISIONS[mode](*_whole_operands(call, x, y))


@lowers("aten::floor_divide", "aten::floor_divide.Scalar")
def _divide_floor(call: Call, x: Array, y: Array) -> Array:
    return _floor_divide(*_whole_operands(call, x, y))


@lowers("aten::remainder.Tensor", "aten::remainder.Scalar", "aten::remainder.Scalar_Tensor")
def _remainder(call: Call, x: Array, y: Array) -> Array:
    return jnp.remainder(*_whole_operands(call, x, y))


@lowers("aten::fmod.Tensor", "aten::fmod.Scalar")
def _fmod(call: Call, x: Array, y: Array) -> Array:
    return lax.rem(*jnp.broadcast_arrays(*_whole_operands(call, x, y)))


# ---- powers

_POWERS = {
    0.5: jnp.sqrt,
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    -0.5: lax.rsqrt,
    -1.0: lambda x: 1 / x,
    -2.0: lambda x: 1 / (x * x),
}


def _is_inexact(node: Node) -> bool:
    """Powers of whole numbers have rules of their own (and refuse negative exponents)."""
    dtype = node.results[0].type.dtype
    return dtype.is_floating_point or dtype.is_complex


@lowers("aten::pow.Tensor_Scalar", settled="exponent", when=_is_inexact)
def _power(call: Call, x: Array, exponent: Any) -> Array:
    x = cast(x, call.wide)
    if isinstance(exponent, int | float) and float(exponent) in _POWERS:
        return _POWERS[float(exponent)](x)
    return jnp.power(x, cast(exponent, call.wide))


pointwise(in_result, {"aten::pow.Tensor_Tensor": jnp.power, "aten::pow.Scalar": jnp.power}, when=_is_inexact)

# ---- three operands


def _lerp(start: Array, end: Array, weight: Array) -> Array:
    """From whichever end is nearer, so that a weight of 1 gives `end` exactly."""
    difference = end - start
    return jnp.where(jnp.abs(weight) < 0.5, start + weight * difference, end - difference * (1 - weight))


def _clamp(x: Array, low: Array | None, high: Array | None) -> Array:
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


pointwise(
    in_result,
    {
        "aten::addcdiv": lambda x, a, b, value: x + value * (a / b),
        "aten::addcmul": lambda x, a, b, value: x + value * a * b,
        "aten::clamp": _clamp,
        "aten::clamp.Tensor": _clamp,
        "aten::clamp_max": jnp.minimum,
        "aten::clamp_max.Tensor": jnp.minimum,
        "aten::clamp_min": jnp.maximum,
        "aten::clamp_min.Tensor": jnp.maximum,
        "aten::lerp.Scalar": _lerp,
        "aten::lerp.Tensor": _lerp,
    },
)


@lowers("aten::where.self")
def _where(call: Call, condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(cast(condition, jnp.bool_), cast(x, call.dtype), cast(y, call.dtype))


@lowers("aten::masked_fill.Scalar", "aten::masked_fill.Tensor")
def _masked_fill(call: Call, x: Array, mask: Array, value: Array) -> Array:
    return jnp.where(mask, cast(value, call.dtype), x)


# ---- activations


def _gelu(x: Array, approximate: str) -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(_GELU_SLOPE * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


_GELU_SLOPE = math.sqrt(2 / math.pi)


def _elu(x: Array, alpha: Array, scale: Array, input_scale: Array) -> Array:
    return scale * jnp.where(x <= 0, alpha * jnp.expm1(jnp.minimum(x, 0) * input_scale), x)


pointwise(
    in_result,
    {
        "aten::elu": _elu,
        "aten::hardtanh": _clamp,
        "aten::leaky_relu": lambda x, slope: jnp.where(x > 0, x, x * slope),
        "aten::gelu": _gelu,
        "aten::native_dropout_backward": lambda gradient, mask, scale: gradient * mask * scale,
    },
)
