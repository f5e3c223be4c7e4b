"""Operators made for neural networks: normalization, losses, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


@lowers("aten::native_batch_norm_backward")
def _batch_norm_gradient(
    call: Call,
    gradient: Array,
    x: Array,
    weight: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    mean: Array | None,
    inverse: Array | None,
    training: bool,
    eps: Any,
    mask: Sequence[bool],
) -> tuple[Array | None, ...]:
    dtype = jnp.float32 if x.dtype in (jnp.float16, jnp.bfloat16) else x.dtype
    gradient, x = cast(gradient, dtype), cast(x, dtype)
    if not training:
        mean, inverse = running_mean, lax.rsqrt(cast(running_var, dtype) + cast(eps, dtype))
    around = _not_channels(x.ndim)
    scale = _per_channel(cast(inverse, dtype), x.ndim)
    normal = (x - _per_channel(cast(mean, dtype), x.ndim)) * scale
    by_bias = jnp.sum(gradient, axis=around)
    by_weight = jnp.sum(gradient * normal, axis=around)
    by_input = None
    if mask[0]:
        by_input = gradient
        if training:
            count = math.prod(x.shape[d] for d in around)
            by_input = by_input - _per_channel(by_bias / count, x.ndim)
            by_input = by_input - normal * _per_channel(by_weight / count, x.ndim)
        by_input = _affine(by_input * scale, weight, None, x.ndim)
    return by_input, by_weight if mask[1] else None, by_bias if mask[2] else None


# ---- layer and group normalization: statistics per sample


def _normalized(x: Array, dims: tuple[int, ...], eps: Any) -> tuple[Array, Array, Array]:
    mean = jnp.mean(x, axis=dims, keepdims=True)
    centred = x - mean
    inverse = lax.rsqrt(jnp.mean(centred * centred, axis=dims, keepdims=True) + cast(eps, x.dtype))
    return centred * inverse, mean, inverse


@lowers("aten::native_layer_norm")
def _layer_norm(
    call: Call, x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: Any
) -> tuple[Array, ...]:
    x = cast(x, call.wide)
    out, mean, inverse = _normalized(x, tuple(range(x.ndim - len(shape), x.ndim)), eps)
    out = out if weight is None else out * cast(weight, x.dtype)
    return out if bias is None else out + cast(bias, x.dtype), mean, inverse


@lowers("aten::native_layer_norm_backward")
def _layer_norm_gradient(
    call: Call,
    gradient: Array,
    x: Array,
    shape: Sequence[int],
    mean: Array,
    inverse: Array,
    weight: Array | None,
    bias: Array | None,
    mask: Sequence[bool],
) -> tuple[Array | None, ...]:
    dtype = jnp.float32 if x.dtype in (jnp.float16, jnp.bfloat16) else x.dtype
    gradient, x, mean, inverse = (cast(array, dtype) for array in (gradient, x, mean, inverse))
    outer = tuple(range(x.ndim - len(shape)))
    inner = tuple(range(x.ndim - len(shape), x.ndim))
    normal = (x - mean) * inverse
    scaled = gradient if weight is None else gradient * cast(weight, dtype)
    by_input = inverse * (
        scaled
        - jnp.mean(scaled, axis=inner, keepdims=True)
        - normal * jnp.mean(scaled * normal, axis=inner, keepdims=True)
    )
    by_weight, by_bias = jnp.sum(gradient * normal, axis=outer), jnp.sum(gradient, axis=outer)
    return tuple(made if wanted else None for made, wanted in zip((by_input, by_weight, by_bias), mask, strict=True))


@lowers("aten::native_group_norm")
def _group_norm(
    call: Call, x: Array, weight: Array | None, bias: Array | None, n: int, c: int, size: int, groups: int, eps: Any
) -> tuple[Array, ...]:
    wide = cast(x, call.wide)
    out, mean, inverse = _normalized(wide.reshape(n, groups, -1), (2,), eps)
    out = _affine(out.reshape(x.shape), weight, bias, x.ndim)
    return out, mean.reshape(n, groups), inverse.reshape(n, groups)


# ---- the negative log likelihood

_MEAN, _SUM = 1, 2


def _weights(call: Call, x: Array, target: Array, weight: Array | None, ignored: int) -> tuple[Array, Array]:
    """The class of each sample, 0 where it is ignored, and the sample's weight, 0 where it is ignored."""
    classes = x.shape[-1]
    counts = target != ignored
    call.require(~counts | ((target >= 0) & (target < classes)))
    target = jnp.where(counts, target, 0)
    weights = jnp.ones(target.shape, x.dtype) if weight is None else cast(weight, x.dtype)[target]
    return target, jnp.where(counts, weights, 0)


@lowers("aten::nll_loss_forward")
def _nll_loss(
    call: Call, x: Array, target: Array, weight: Array | None, reduction: int, ignored: int
) -> tuple[Array, Array]:
    x = cast(x, call.wide)
    target, weights = _weights(call, x, target, weight, ignored)
    losses = -weights * jnp.take_along_axis(x, target[..., None], axis=-1)[..., 0]
    losses = jnp.where(weights == 0, 0, losses)
    total = jnp.sum(weights)
    if reduction == _MEAN:
        return jnp.sum(losses) / total, total
    return (jnp.sum(losses), total) if reduction == _SUM else (losses, jnp.zeros((), x.dtype))


@lowers("aten::nll_loss_backward")
def _nll_loss_gradient(
    call: Call,
    gradient: Array,
    x: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignored: int,
    total: Array,
) -> Array:
    x = cast(x, call.wide)
    target, weights = _weights(call, x, target, weight, ignored)
    share = -weights * cast(gradient, x.dtype)
    if reduction == _MEAN:
        share = share / cast(total, x.dtype)
    share = jnp.where(weights == 0, 0, share)
    chosen = jnp.arange(x.shape[-1], dtype=target.dtype) == target[..., None]
    return jnp.where(chosen, share[..., None], 0)


# ---- dropout: ATen draws the mask, the program applies it


@lowers("aten::native_dropout")
def _dropout(call: Call, x: Array, probability: Any, train: bool | None) -> tuple[Array, Array]:
    (mask,) = call.drawn
    if train is False:
        return x, mask
    kept = 1 - cast(probability, jnp.float64)
    scale = jnp.where(kept == 0, 0, 1 / jnp.where(kept == 0, 1, kept))
    return cast(x, call.wide) * cast(mask, call.wide) * cast(scale, call.wide), mask
