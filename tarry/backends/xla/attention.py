"""Scaled dot product attention, in the forms that PyTorch's fused kernels have on the CPU and on CUDA."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from tarry.backends.xla.linear import matmul
from tarry.backends.xla.table import Array, Call, cast, lowers
from tarry.ir.graph import Node, Number
from tarry.ir.operators import operator

_ON_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"
_ON_CUDA = "aten::_scaled_dot_product_efficient_attention"


def _is_plain(node: Node) -> bool:
    """Dropout within attention is drawn inside the kernel, so it is left to the real device; so are shared heads."""
    described = operator(node.op)
    dropout, query, key = (node.args[described.index_of(name)] for name in ("dropout_p", "query", "key"))
    sizes = [value.type.sizes[:2] for value in (query, key)]  # type: ignore[union-attr]
    return (isinstance(dropout, Number) or dropout == 0) and sizes[0] == sizes[1]


def _lowers(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lowers(name, constant="dropout_p", when=_is_plain)


def _scores(query: Array, key: Array, causal: bool, mask: Array | None, scale: Array) -> Array:
    scores = matmul(query, key.swapaxes(-1, -2)) * scale
    if mask is not None:
        scores = scores + cast(mask, scores.dtype)
    if causal:
        rows, columns = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], d) for d in (0, 1))
        scores = jnp.where(rows >= columns, scores, -jnp.inf)
    return scores


def _scale(query: Array, scale: Any) -> Array:
    return cast(1 / math.sqrt(query.shape[-1]) if scale is None else scale, query.dtype)


def _attend(
    call: Call, query: Array, key: Array, value: Array, causal: bool, mask: Array | None, scale: Any
) -> tuple[Array, Array]:
    """The result, and the logarithm of the sum of each row's exponentials, from which the weights can be had again."""
    query, key, value = (cast(array, call.wide) for array in (query, key, value))
    scores = _scores(query, key, causal, mask, _scale(query, scale))
    highest = jnp.max(scores, axis=-1, keepdims=True)
    highest = jnp.where(jnp.isneginf(highest), 0, highest)  # a row that sees nothing
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return matmul(weights, value) / jnp.where(total == 0, 1, total), (jnp.log(total) + highest)[..., 0]


def _gradients(
    call: Call,
    gradient: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    causal: bool,
    mask: Array | None,
    scale: Any,
) -> tuple[Array, Array, Array, Array]:
    """By query, key, value, and by the scores before they were scaled: that is by the mask."""
    gradient, query, key, value, out = (cast(array, call.wide) for array in (gradient, query, key, value, out))
    scale = _scale(query, scale)
    scores = _scores(query, key, causal, mask, scale)
    logsumexp = cast(logsumexp, call.wide)[..., None]
    weights = jnp.where(jnp.isneginf(logsumexp), 0, jnp.exp(scores - logsumexp))
    by_value = matmul(weights.swapaxes(-1, -2), gradient)
    by_weights = matmul(gradient, value.swapaxes(-1, -2))
    by_mask = weights * (by_weights - jnp.sum(gradient * out, axis=-1, keepdims=True))
    by_scores = by_mask * scale
    return matmul(by_scores, key), matmul(by_scores.swapaxes(-1, -2), query), by_value, by_mask


@_lowers(_ON_CPU)
def _attention(
    call: Call, query: Array, key: Array, value: Array, dropout: Any, causal: bool, mask: Any, scale: Any
) -> tuple[Array, Array]:
    return _attend(call, query, key, value, causal, mask, scale)


@_lowers(f"{_ON_CPU}_backward")
def _attention_gradient(
    call: Call,
    gradient: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dropout: Any,
    causal: bool,
    mask: Any,
    scale: Any,
) -> tuple[Array, ...]:
    return _gradients(call, gradient, query, key, value, out, logsumexp, causal, mask, scale)[:3]


@_lowers(_ON_CUDA)
def _efficient_attention(
    call: Call,
    query: Array,
    key: Array,
    value: Array,
    mask: Any,
    keep_sums: bool,
    dropout: Any,
    causal: bool,
    scale: Any,
) -> tuple[Array, ...]:
    out, sums = _attend(call, query, key, value, causal, mask, scale)
    # The kernel pads the rows of the sums, and returns none if no gradient is wanted; two seeds of dropout follow.
    wanted = call.node.outputs[1]
    rows = sums.shape[-1] if wanted is None else wanted.type.sizes[-1]
    sums = jnp.pad(sums, ((0, 0), (0, 0), (0, max(rows - sums.shape[-1], 0))))[..., :rows]
    seeds = [None if value is None else jnp.zeros(value.type.sizes) for value in call.node.outputs[2:]]
    return out, sums, *seeds


@_lowers(f"{_ON_CUDA}_backward")
def _efficient_attention_gradient(
    call: Call,
    gradient: Array,
    query: Array,
    key: Array,
    value: Array,
    mask: Any,
    out: Array,
    sums: Array,
    seed: Any,
    offset: Any,
    dropout: Any,
    wanted: Sequence[bool],
    causal: bool,
    scale: Any,
) -> tuple[Array | None, ...]:
    sums = sums[..., : query.shape[-2]]
    made = _gradients(call, gradient, query, key, value, out, sums, causal, mask, scale)
    return tuple(array if value is not None else None for array, value in zip(made, call.node.outputs, strict=True))
