"""Batch normalization, whose momentum may be another at each step, and dropout."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from tarry.backends.xla.table import Array, Call, cast, lowers

# ---- batch normalization: statistics per channel, dimension 1


def _per_channel(x: Array, rank: int) -> Array:
    return x.reshape(-1, *(1,) * (rank - 2)) if rank > 1 else x


def _not_channels(rank: int) -> tuple[int, ...]:
    return tuple(d for d in range(rank) if d != 1)


def _affine(x: Array, weight: Array | None, bias: Array | None, rank: int) -> Array:
    x = x if weight is None else x * _per_channel(cast(weight, x.dtype), rank)
    return x if bias is None else x + _per_channel(cast(bias, x.dtype), rank)


def _statistics(x: Array) -> tuple[Array, Array]:
    mean = jnp.mean(x, axis=_not_channels(x.ndim))
    centred = x - _per_channel(mean, x.ndim)
    return mean, jnp.mean(centred * centred, axis=_not_channels(x.ndim))


# The second form is how evaluation comes: the statistics count as written there, though they stay as they are.
@lowers("aten::_native_batch_norm_legit_functional", "aten::_native_batch_norm_legit")
def _batch_norm_training(
    call: Call,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: Any,
    eps: Any,
) -> tuple[Array, ...]:
    return _batch_norm(call, x, weight, bias, running_mean, running_var, training, momentum, eps)


@lowers(
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit_no_training",
    "aten::_native_batch_norm_legit.no_stats",
)
def _batch_norm_pure(call: Call, x: Array, weight: Array | None, bias: Array | None, *rest: Any) -> tuple[Array, ...]:
    if call.node.op == "aten::_native_batch_norm_legit.no_stats":
        rest = (None, None, *rest)
    elif call.node.op == "aten::_native_batch_norm_legit_no_training":
        rest = (rest[0], rest[1], False, *rest[2:])
    return _batch_norm(call, x, weight, bias, *rest)[:3]


def _batch_norm(
    call: Call,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: Any,
    eps: Any,
) -> tuple[Array, ...]:
    """Result, mean and 1/std of the batch (empty in evaluation), the new running statistics."""
    x = cast(x, call.wide)
    eps, momentum = cast(eps, x.dtype), cast(momentum, x.dtype)
    if not training:
        inverse = lax.rsqrt(cast(running_var, x.dtype) + eps)
        centred = x - _per_channel(cast(running_mean, x.dtype), x.ndim)
        out = _affine(centred * _per_channel(inverse, x.ndim), weight, bias, x.ndim)
        empty = jnp.zeros((0,), x.dtype)
        return out, empty, empty, running_mean, running_var
    mean, variance = _statistics(x)
    inverse = 1 / jnp.sqrt(variance + eps)
    out = _affine((x - _per_channel(mean, x.ndim)) * _per_channel(inverse, x.ndim), weight, bias, x.ndim)
    if running_mean is None or running_var is None:
        return out, mean, inverse, mean, variance
    count = math.prod(x.shape[d] for d in _not_channels(x.ndim))
    unbiased = variance * (count / max(count - 1, 1)) if count > 1 else variance * jnp.nan
    new_mean = momentum * mean + (1 - momentum) * cast(running_mean, x.dtype)
    new_var = momentum * unbiased + (1 - momentum) * cast(running_var, x.dtype)
    return out, mean, inverse, new_mean, new_var


# ---- dropout: ATen draws the mask, the program applies it


@lowers("aten::native_dropout")
def _dropout(call: Call, x: Array, probability: Any, train: bool | None) -> tuple[Array, Array]:
    (mask,) = call.drawn
    if train is False:
        return x, mask
    kept = 1 - cast(probability, jnp.float64)
    scale = jnp.where(kept == 0, 0, 1 / jnp.where(kept == 0, 1, kept))
    return cast(x, call.wide) * cast(mask, call.wide) * cast(scale, call.wide), mask
