"""Operators that make, move or copy elements: factories, views, windows written back, joining and padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tarry.backends.xla.table import Array, Call, cast, lowers
from tarry.ir.graph import Node
from tarry.ir.layout import TensorType, extent, memory_order

# ---- from nothing


@lowers("aten::full", "aten::scalar_tensor")
def _full(call: Call, *args: Any) -> Array:
    fill = args[1] if call.node.op == "aten::full" else args[0]
    return jnp.full(call.type.sizes, cast(fill, call.dtype))


@lowers("aten::full_like", "aten::fill.Scalar", "aten::fill.Tensor")
def _full_like(call: Call, like: Array, fill: Array, *options: Any) -> Array:
    return jnp.full(call.type.sizes, cast(fill, call.dtype))


@lowers("aten::zeros", "aten::zeros_like", "aten::zero", "aten::empty_strided", "aten::empty.memory_format")
def _zeros(call: Call, *args: Any) -> Array:
    return jnp.zeros(call.type.sizes, call.dtype)


@lowers("aten::arange.start_step")
def _arange(call: Call, start: Any, end: Any, step: Any, *options: Any) -> Array:
    """As many elements as were recorded; computed in float64, as ATen does, unless all is whole."""
    dtype = jnp.float64 if call.type.dtype.is_floating_point else jnp.int64
    return cast(start, dtype) + cast(step, dtype) * lax.iota(dtype, call.type.numel)


# ---- copies

for _name in ("aten::clone", "aten::_to_copy", "aten::lift_fresh_copy"):
    # A real copy: JAX hands an argument that is a result as well straight back, and two results need two buffers.
    lowers(_name)(lambda call, x, *options: jnp.array(x, copy=True))


@lowers("aten::copy")
def _copy(call: Call, x: Array, source: Array, non_blocking: bool) -> Array:
    return jnp.broadcast_to(cast(source, call.dtype), x.shape)


# ---- views


lowers(
    "aten::view",
    "aten::view_copy",
    "aten::_unsafe_view",
    "aten::alias",
    "aten::squeeze.dim",
    "aten::squeeze.dims",
    "aten::unsqueeze",
)(lambda call, x, *shape: x.reshape(call.type.sizes))
lowers("aten::permute", "aten::permute_copy")(lambda call, x, dims: lax.transpose(x, [d % x.ndim for d in dims]))


@lowers("aten::expand")
def _expand(call: Call, x: Array, sizes: Sequence[int], implicit: bool) -> Array:
    return jnp.broadcast_to(x, call.type.sizes)


def _bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """A slice's bounds as PyTorch clamps them."""
    first = 0 if start is None else start
    last = size if end is None else end
    first = min(max(first + size if first < 0 else first, 0), size)
    return first, min(max(last + size if last < 0 else last, first), size)


@lowers("aten::slice.Tensor")
def _slice(call: Call, x: Array, dim: int, start: int | None, end: int | None, step: int) -> Array:
    first, last = _bounds(x.shape[dim], start, end)
    return lax.slice_in_dim(x, first, last, step, dim)


@lowers("aten::select.int")
def _select(call: Call, x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index, dim, keepdims=False)


@lowers("aten::diagonal")
def _diagonal(call: Call, x: Array, offset: int, dim1: int, dim2: int) -> Array:
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers("aten::view.dtype", when=lambda node: not (_has_bool(node) or _has_complex(node)))
def _view_dtype(call: Call, x: Array, dtype: Any) -> Array:
    """Bytes read as another dtype. A wider one takes up the last dimension, which is why JAX wants it apart."""
    old, new = x.dtype.itemsize, call.dtype(0).dtype.itemsize
    if new > old:
        x = x.reshape(*x.shape[:-1], x.shape[-1] * old // new, new // old)
    return lax.bitcast_convert_type(x, call.dtype).reshape(call.type.sizes)


def _has_bool(node: Node) -> bool:
    return any(value.type.dtype.itemsize == 1 for value in (*node.operands, *node.results))


def _has_complex(node: Node) -> bool:
    return any(value.type.dtype.is_complex for value in (*node.operands, *node.results))


@lowers("aten::view_as_real")
def _view_as_real(call: Call, x: Array) -> Array:
    return jnp.stack([x.real, x.imag], axis=-1)


@lowers("aten::view_as_complex")
def _view_as_complex(call: Call, x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


# ---- windows on a buffer


def _in_memory(x: Array, type_: TensorType) -> Array:
    """The elements of a dense tensor in the order in which they lie in its buffer."""
    return x.transpose(memory_order(type_.sizes, type_.strides)).reshape(-1)


def _from_memory(flat: Array, type_: TensorType) -> Array:
    order = memory_order(type_.sizes, type_.strides)
    return flat.reshape([type_.sizes[d] for d in order]).transpose(np.argsort(order))


def _places(sizes: Sequence[int], strides: Sequence[int], offset: int) -> Any:
    places = np.full(tuple(sizes), offset, dtype=np.int64)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        places += (np.arange(size, dtype=np.int64) * stride).reshape([-1 if d == dim else 1 for d in range(len(sizes))])
    return places


def _is_dense_window(node: Node) -> bool:
    """The buffer is known, and the window is small enough for a table of places."""
    window: tuple[Any, ...] = node.args[-3:]
    sizes, strides, offset = window
    base = node.operands[0].type
    return base.is_dense and extent(sizes, strides) + (offset or 0) <= base.numel and math.prod(sizes) <= 1 << 22


@lowers("aten::as_strided", when=_is_dense_window)
def _as_strided(call: Call, x: Array, sizes: Sequence[int], strides: Sequence[int], offset: int | None) -> Array:
    return _in_memory(x, call.node.operands[0].type)[_places(sizes, strides, offset or 0)]


@lowers("aten::as_strided_scatter", when=_is_dense_window)
def _as_strided_scatter(
    call: Call, x: Array, source: Array, sizes: Sequence[int], strides: Sequence[int], offset: int | None
) -> Array:
    type_ = call.node.operands[0].type
    flat = _in_memory(x, type_).at[_places(sizes, strides, offset or 0)].set(source)
    return _from_memory(flat, type_)


def _window(x: Array, dim: int, window: Any) -> tuple[Any, ...]:
    return (*itertools.repeat(slice(None), dim % x.ndim), window)


@lowers("aten::slice_scatter")
def _slice_scatter(
    call: Call, x: Array, source: Array, dim: int, start: int | None, end: int | None, step: int
) -> Array:
    first, last = _bounds(x.shape[dim], start, end)
    return x.at[_window(x, dim, slice(first, last, step))].set(source)


@lowers("aten::diagonal_scatter")
def _diagonal_scatter(call: Call, x: Array, source: Array, offset: int, dim1: int, dim2: int) -> Array:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    row, column = max(-offset, 0), max(offset, 0)
    along = np.arange(source.shape[-1])
    return jnp.moveaxis(moved.at[..., along + row, along + column].set(source), (-2, -1), (dim1, dim2))


# ---- joining, padding, rearranging


@lowers("aten::cat")
def _cat(call: Call, parts: Sequence[Array], dim: int) -> Array:
    # An empty one-dimensional tensor can be joined with anything: PyTorch has kept that from its beginnings.
    kept = [cast(part, call.dtype) for part in parts if part.shape != (0,)]
    return lax.concatenate(kept, dim % kept[0].ndim) if kept else jnp.zeros(call.type.sizes, call.dtype)


@lowers("aten::split_with_sizes")
def _split(call: Call, x: Array, sizes: Sequence[int], dim: int) -> tuple[Array, ...]:
    ends = list(itertools.accumulate(sizes))
    return tuple(lax.slice_in_dim(x, end - size, end, axis=dim) for size, end in zip(sizes, ends, strict=True))


@lowers("aten::constant_pad_nd")
def _constant_pad(call: Call, x: Array, pads: Sequence[int], value: Array) -> Array:
    widths = [(0, 0, 0)] * x.ndim
    for k in range(len(pads) // 2):
        widths[x.ndim - 1 - k] = (pads[2 * k], pads[2 * k + 1], 0)
    return lax.pad(x, cast(value, x.dtype), widths)


lowers("aten::flip")(lambda call, x, dims: jnp.flip(x, [d % x.ndim for d in dims]))
lowers("aten::repeat")(lambda call, x, repeats: jnp.tile(x, repeats))
lowers("aten::complex")(lambda call, real, imaginary: lax.complex(*jnp.broadcast_arrays(real, imaginary)))
