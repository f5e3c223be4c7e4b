"""Operators that read or write at places given by other tensors.

XLA clamps a place that is out of range; eager refuses it. Every such operator therefore demands that its places are in
range, and the step fails where they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from tarry.backends.xla.table import Array, Call, cast, lowers
from tarry.ir.graph import Node, Value


def in_range(call: Call, index: Array, size: int) -> Array:
    """An index that must be at least 0 and less than `size`."""
    call.require((index >= 0) & (index < size))
    return index


def wrapped(call: Call, index: Array, size: int) -> Array:
    """An index that may count from the end."""
    call.require((index >= -size) & (index < size))
    return jnp.where(index < 0, index + size, index)


# ---- embeddings


@lowers("aten::embedding")
def _embedding(call: Call, weight: Array, index: Array, padding: int, scale: bool, sparse: bool) -> Array:
    return weight.at[in_range(call, index, weight.shape[0])].get(mode="clip")


def _plain_gradient(node: Node) -> bool:
    return node.args[4] is False  # not scaled by how often each row occurs


_FEW_ROWS = 2048


@lowers("aten::embedding_dense_backward", when=_plain_gradient)
def _embedding_gradient(
    call: Call, gradient: Array, index: Array, rows: int, padding: int, by_frequency: bool
) -> Array:
    gradient = cast(gradient, call.wide).reshape(-1, call.type.sizes[-1])
    index = index.reshape(-1)
    if padding >= 0:
        gradient = jnp.where((index == padding)[:, None], 0, gradient)
    if rows <= _FEW_ROWS:
        # XLA writes scattered rows one after the other; for few rows a product with zeros and ones is quicker.
        chosen = (index[:, None] == jnp.arange(rows, dtype=index.dtype)).astype(gradient.dtype)
        return lax.dot_general(chosen, gradient, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
    return jnp.zeros((rows, gradient.shape[-1]), gradient.dtype).at[index].add(gradient)


# ---- along one dimension


@lowers("aten::index_select")
def _index_select(call: Call, x: Array, dim: int, index: Array) -> Array:
    if x.ndim == 0:
        in_range(call, index, 1)
        return x.reshape(call.type.sizes)
    return jnp.take(x, in_range(call, index.reshape(-1), x.shape[dim]), axis=dim, mode="clip")


def _along(index: Array, dim: int) -> tuple[Array, ...]:
    """The places that an index of the rank of its target means: itself along `dim`, its own position elsewhere."""
    return tuple(
        index if d == dim % index.ndim else lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim)
    )


def _has_rank(node: Node) -> bool:
    return all(value.type.rank > 0 for value in node.operands[:2])


@lowers("aten::gather", when=_has_rank)
def _gather(call: Call, x: Array, dim: int, index: Array, sparse: bool) -> Array:
    return x.at[_along(in_range(call, index, x.shape[dim]), dim)].get(mode="clip")


def _source(index: Array, source: Array) -> Array:
    """The part of the source that the index covers."""
    return source[tuple(slice(size) for size in index.shape)]


@lowers("aten::scatter.src", when=_has_rank)
def _scatter(call: Call, x: Array, dim: int, index: Array, source: Array) -> Array:
    return x.at[_along(in_range(call, index, x.shape[dim]), dim)].set(_source(index, source))


@lowers("aten::scatter.value", when=_has_rank)
def _scatter_value(call: Call, x: Array, dim: int, index: Array, value: Array) -> Array:
    return x.at[_along(in_range(call, index, x.shape[dim]), dim)].set(cast(value, x.dtype))


@lowers("aten::scatter_add", when=_has_rank)
def _scatter_add(call: Call, x: Array, dim: int, index: Array, source: Array) -> Array:
    places = _along(in_range(call, index, x.shape[dim]), dim)
    return cast(x, call.wide).at[places].add(cast(_source(index, source), call.wide))


@lowers("aten::index_add", when=_has_rank)
def _index_add(call: Call, x: Array, dim: int, index: Array, source: Array, alpha: Array) -> Array:
    places = (*[slice(None)] * (dim % x.ndim), in_range(call, index.reshape(-1), x.shape[dim]))
    return cast(x, call.wide).at[places].add(cast(source, call.wide) * cast(alpha, call.wide))


# ---- along several


def _by_place(node: Node) -> bool:
    """Masks have as many results as they have ones, which no program knows."""
    indices = node.args[1]
    assert isinstance(indices, tuple)
    return all(
        index is None or (isinstance(index, Value) and index.type.dtype in (torch.int64, torch.int32))
        for index in indices
    )


def _places(call: Call, x: Array, indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else wrapped(call, index, x.shape[d]) for d, index in enumerate(indices))


@lowers("aten::index.Tensor", "aten::_unsafe_index.Tensor", when=_by_place)
def _index(call: Call, x: Array, indices: Sequence[Array | None]) -> Array:
    return x.at[_places(call, x, indices)].get(mode="clip")


_PUTS = ("aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put")


def _is_mask(node: Node) -> bool:
    """One mask over the leading dimensions and one value for all that it marks: a choice, whatever the mask."""
    indices, values, accumulate = node.args[1:4]
    assert isinstance(indices, tuple)
    return (
        len(indices) == 1
        and isinstance(indices[0], Value)
        and indices[0].type.dtype == torch.bool
        and isinstance(values, Value)
        and values.type.rank == 0
        and accumulate is False
    )


@lowers(*_PUTS, when=lambda node: _by_place(node) or _is_mask(node))
def _index_put(
    call: Call, x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool, unsafe: bool = False
) -> Array:
    values = cast(values, x.dtype)
    if _is_mask(call.node):
        (mask,) = indices
        assert mask is not None
        return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), values, x)
    target = x.at[_places(call, x, indices)]
    return target.add(values) if accumulate else target.set(values)
