"""Operators that reduce, scan or sort along dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tarry.backends.xla.table import Array, Call, cast, lowers
from tarry.ir.graph import Node


def axes(dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """The dimensions to reduce, counted from the front; none given means all."""
    if dims is None or dims == () or dims == []:
        return tuple(range(rank))
    listed = (dims,) if isinstance(dims, int) else dims
    return tuple(d % rank for d in listed) if rank else ()


# ---- sums and the like: over all, or over some dimensions


def _reduce(function: Callable[..., Array], whole: str, some: Sequence[str]) -> None:
    """`whole` reduces everything; `some` take dimensions and whether to keep them."""

    @lowers(whole)
    def reduce_all(call: Call, x: Array, *options: Any) -> Array:
        return function(cast(x, call.wide), axis=None, keepdims=False)

    @lowers(*some)
    def reduce_some(call: Call, x: Array, dims: Any, keepdim: bool, *options: Any) -> Array:
        return function(cast(x, call.wide), axis=axes(dims, x.ndim), keepdims=keepdim)


_reduce(jnp.sum, "aten::sum", ["aten::sum.dim_IntList"])
_reduce(jnp.mean, "aten::mean", ["aten::mean.dim"])
_reduce(jnp.prod, "aten::prod", ["aten::prod.dim_int"])


def _not_empty(node: Node) -> bool:
    """Extremes of nothing are an error of eager's, which the real device raises."""
    return node.operands[0].type.numel > 0 and not node.operands[0].type.dtype.is_complex


def _truth(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda call, x, dims=None, keepdim=False: function(
        cast(x, jnp.bool_), axis=axes(dims, x.ndim), keepdims=keepdim
    )


lowers("aten::any", "aten::any.dim", "aten::any.dims")(_truth(jnp.any))
lowers("aten::all", "aten::all.dim", "aten::all.dims")(_truth(jnp.all))


def _extreme(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda call, x, dims=None, keepdim=False: function(x, axis=axes(dims, x.ndim), keepdims=keepdim)


lowers("aten::amax", "aten::max", when=_not_empty)(_extreme(jnp.max))
lowers("aten::amin", "aten::min", when=_not_empty)(_extreme(jnp.min))


def _where_extreme(function: Callable[..., Array]) -> Callable[..., Array]:
    """The place of the extreme; without a dimension, in the flattened tensor."""

    def lowered(call: Call, x: Array, dim: int | None, keepdim: bool) -> Array:
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        if dim is None or x.ndim == 0:
            return function(x.reshape(-1), axis=0).reshape(call.type.sizes)
        return function(x, axis=dim, keepdims=keepdim)

    return lowered


lowers("aten::argmax", when=_not_empty)(_where_extreme(jnp.argmax))
lowers("aten::argmin", when=_not_empty)(_where_extreme(jnp.argmin))


def _extreme_and_where(extreme: Callable[..., Array], where: Callable[..., Array]) -> Callable[..., Any]:
    def lowered(call: Call, x: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
        if x.ndim == 0:
            return x, jnp.zeros((), jnp.int64)
        values = extreme(x, axis=dim, keepdims=keepdim)
        return values, where(x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x, axis=dim, keepdims=keepdim)

    return lowered


lowers("aten::max.dim", when=_not_empty)(_extreme_and_where(jnp.max, jnp.argmax))
lowers("aten::min.dim", when=_not_empty)(_extreme_and_where(jnp.min, jnp.argmin))


def _count(x: Array, dims: Any) -> int:
    return math.prod(x.shape[d] for d in axes(dims, x.ndim))


def _variance(call: Call, x: Array, dims: Any, correction: Any, keepdim: bool) -> tuple[Array, Array]:
    x = cast(x, call.wide) if not jnp.iscomplexobj(x) else x
    mean = jnp.mean(x, axis=axes(dims, x.ndim), keepdims=True)
    squares = jnp.sum(jnp.square(jnp.abs(x - mean)), axis=axes(dims, x.ndim), keepdims=keepdim)
    left_over = max(_count(x, dims) - (1 if correction is None else correction), 0)
    return squares / jnp.asarray(left_over, squares.dtype), mean.reshape(squares.shape)


@lowers("aten::var.correction", constant="correction")
def _var(call: Call, x: Array, dims: Any, correction: Any, keepdim: bool) -> Array:
    return _variance(call, x, dims, correction, keepdim)[0]


@lowers("aten::var_mean.correction", constant="correction")
def _var_mean(call: Call, x: Array, dims: Any, correction: Any, keepdim: bool) -> tuple[Array, Array]:
    return _variance(call, x, dims, correction, keepdim)


def _norm_of_order(order: float, x: Array, dims: tuple[int, ...], keepdim: bool) -> Array:
    if order == math.inf:
        return jnp.max(jnp.abs(x), axis=dims, keepdims=keepdim, initial=0)
    if order == 1:
        return jnp.sum(jnp.abs(x), axis=dims, keepdims=keepdim)
    return jnp.sqrt(jnp.sum(x * x, axis=dims, keepdims=keepdim))


def _knows_order(node: Node) -> bool:
    # Asked before the order is made a constant, it is still a number, which has the value that was recorded.
    order = getattr(node.args[1], "value", node.args[1])
    return order in (1, 2, math.inf) and not node.operands[0].type.dtype.is_complex


@lowers("aten::linalg_vector_norm", constant="ord", when=_knows_order)
def _vector_norm(call: Call, x: Array, order: float, dims: Any, keepdim: bool, dtype: Any) -> Array:
    return _norm_of_order(order, cast(x, call.wide), axes(dims, x.ndim), keepdim)


# ---- scans


@lowers("aten::cumsum")
def _cumsum(call: Call, x: Array, dim: int, dtype: Any) -> Array:
    return jnp.cumsum(cast(x, call.wide), axis=dim) if x.ndim else x


@lowers("aten::cumprod")
def _cumprod(call: Call, x: Array, dim: int, dtype: Any) -> Array:
    return jnp.cumprod(cast(x, call.wide), axis=dim) if x.ndim else x


# ---- order


@lowers("aten::sort", "aten::sort.stable", when=_not_empty)
def _sort(call: Call, x: Array, *args: Any) -> tuple[Array, Array]:
    dim, descending = args[-2:]
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    keys = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    order = jnp.argsort(keys, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order


def _is_ordered_float(node: Node) -> bool:
    return node.operands[0].type.rank > 0 and node.operands[0].type.dtype.is_floating_point


@lowers("aten::topk", when=_is_ordered_float)
def _topk(call: Call, x: Array, k: int, dim: int, largest: bool, is_sorted: bool) -> tuple[Array, Array]:
    last = jnp.moveaxis(x, dim, -1)
    values, places = lax.top_k(last if largest else -last, k)
    return jnp.moveaxis(values if largest else -values, -1, dim), jnp.moveaxis(places, -1, dim)


# ---- softmax


def _softmax(call: Call, x: Array, dim: int, half_to_float: bool) -> Array:
    return jax.nn.softmax(cast(x, call.wide), axis=dim) if x.ndim else jnp.ones_like(x)


def _log_softmax(call: Call, x: Array, dim: int, half_to_float: bool) -> Array:
    return jax.nn.log_softmax(cast(x, call.wide), axis=dim) if x.ndim else jnp.zeros_like(x)


lowers("aten::_softmax")(_softmax)
lowers("aten::_log_softmax")(_log_softmax)
