"""Products of matrices, convolutions, pooling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tarry.backends.xla.table import Array, Call, cast, lowers
from tarry.ir.graph import Node

# Products of float32 are products of float32: without this, XLA takes shorter ones on GPUs.
EXACT = lax.Precision.HIGHEST


def _wide_of(x: Array) -> Any:
    return jnp.float32 if x.dtype in (jnp.float16, jnp.bfloat16) else x.dtype


def matmul(a: Array, b: Array) -> Array:
    """The product over the last two dimensions, summed up in the wider dtype."""
    return jnp.matmul(a, b, precision=EXACT, preferred_element_type=_wide_of(a))


for _name in ("aten::mm", "aten::bmm"):
    lowers(_name)(lambda call, a, b: matmul(a, b))


def _scaled_sum(call: Call, x: Array, beta: Any, product: Array, alpha: Any) -> Array:
    """beta * x + alpha * product. A beta of zero drops x, NaN and all."""
    result = product if _is_one(alpha) else cast(alpha, call.wide) * product
    if isinstance(beta, int | float) and beta == 0:
        return result
    kept = cast(x, call.wide)
    if not _is_one(beta):
        kept = jnp.where(cast(beta, call.wide) == 0, 0, cast(beta, call.wide) * kept)
    return kept + result


def _is_one(number: Any) -> bool:
    return isinstance(number, int | float) and number == 1


@lowers("aten::addmm", settled="alpha beta")
def _addmm(call: Call, x: Array, a: Array, b: Array, beta: Any, alpha: Any) -> Array:
    return _scaled_sum(call, x, beta, matmul(a, b), alpha)


# ---- convolution


def _dimensions(rank: int) -> Any:
    letters = "DHW"[3 - rank :]
    return (f"NC{letters}", f"OI{letters}", f"NC{letters}")


def _convolve(
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    rank = x.ndim - 2
    stride, padding, dilation, output_padding = (
        (*given, *given[:1] * (rank - len(given))) for given in map(tuple, (stride, padding, dilation, output_padding))
    )
    options: dict[str, Any] = {
        "rhs_dilation": dilation,
        "dimension_numbers": _dimensions(rank),
        "feature_group_count": groups,
        "precision": EXACT,
        "preferred_element_type": _wide_of(x),
    }
    if not transposed:
        return lax.conv_general_dilated(x, weight, stride, [(p, p) for p in padding], **options)
    # The gradient of a convolution by its input, written as one: the input spread out, the kernel turned round.
    kernel = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).swapaxes(1, 2)
    kernel = jnp.flip(kernel.reshape(-1, weight.shape[0] // groups, *weight.shape[2:]), range(2, weight.ndim))
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    return lax.conv_general_dilated(x, kernel, (1,) * rank, pads, lhs_dilation=stride, **options)


def _is_real(node: Node) -> bool:
    return node.results[0].type.dtype.is_floating_point and node.operands[0].type.rank in (3, 4, 5)


@lowers("aten::convolution", when=_is_real)
def _convolution(call: Call, x: Array, weight: Array, bias: Array | None, *geometry: Any) -> Array:
    result = _convolve(x, weight, *geometry)
    return result if bias is None else result + cast(bias, result.dtype).reshape(-1, *(1,) * (x.ndim - 2))


@lowers("aten::convolution_backward", when=_is_real)
def _convolution_gradient(
    call: Call, gradient: Array, x: Array, weight: Array, bias_sizes: Any, *rest: Any
) -> tuple[Array | None, ...]:
    *geometry, mask = rest
    x, weight, gradient = (cast(array, _wide_of(array)) for array in (x, weight, gradient))
    by_input = by_weight = by_bias = None
    if mask[0]:
        (by_input,) = jax.linear_transpose(lambda x: _convolve(x, weight, *geometry), x)(gradient)
    if mask[1]:
        (by_weight,) = jax.linear_transpose(lambda w: _convolve(x, w, *geometry), weight)(gradient)
    if mask[2]:
        by_bias = jnp.sum(gradient, axis=(0, *range(2, gradient.ndim)))
    return by_input, by_weight, by_bias


# ---- pooling


def _full(given: Sequence[int], rank: int, default: Sequence[int] = ()) -> tuple[int, ...]:
    """A number for each dimension: one stands for all, none for the default."""
    listed = tuple(given) or tuple(default)
    return listed * rank if len(listed) == 1 else listed


def _geometry(
    x: Array, out: Sequence[int], kernel: Any, stride: Any, padding: Any
) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]:
    """Kernel, strides and the padding on both sides with which windows give exactly the recorded sizes."""
    rank = len(out)
    kernel = _full(kernel, rank)
    stride, padding = _full(stride, rank, kernel), _full(padding, rank)
    sizes = x.shape[x.ndim - rank :]
    ends = [(o - 1) * s + k - n - p for o, s, k, n, p in zip(out, stride, kernel, sizes, padding, strict=True)]
    return kernel, stride, list(zip(padding, ends, strict=True))


_VOLUMES = frozenset(
    {
        *("aten::max_pool3d_with_indices", "aten::max_pool3d_with_indices_backward", "aten::avg_pool3d"),
        *("aten::avg_pool3d_backward", "aten::_adaptive_avg_pool3d_backward"),
    }
)


def _pool_rank(node: Node) -> int:
    return 3 if node.op in _VOLUMES else 2


def _windows(
    x: Array, kernel: Sequence[int], dilation: Sequence[int], stride: Sequence[int], out: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Array]]:
    """For each place in the kernel: what lies under it, in all windows at once."""
    lead = x.ndim - len(out)
    for place in np.ndindex(*kernel):
        starts = [p * d for p, d in zip(place, dilation, strict=True)]
        yield (
            place,
            lax.slice(
                x,
                (0,) * lead + tuple(starts),
                x.shape[:lead] + tuple(b + (o - 1) * s + 1 for b, o, s in zip(starts, out, stride, strict=True)),
                (1,) * lead + tuple(stride),
            ),
        )


@lowers("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices")
def _max_pool(
    call: Call, x: Array, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> tuple[Array, Array]:
    rank = _pool_rank(call.node)
    out, sizes = call.type.sizes[-rank:], x.shape[x.ndim - rank :]
    dilation = _full(dilation, rank)
    spread = [(k - 1) * d + 1 for k, d in zip(_full(kernel, rank), dilation, strict=True)]
    _, stride, pads = _geometry(x, out, spread, stride or kernel, padding)
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    padded = lax.pad(x, cast(lowest, x.dtype), [(0, 0, 0)] * (x.ndim - rank) + [(*pad, 0) for pad in pads])
    best: Array | None = None
    where: Array = 0
    for place, values in _windows(padded, _full(kernel, rank), dilation, stride, out):
        index: Array = 0
        for d in range(rank):
            along = lax.broadcasted_iota(jnp.int64, out, d) * stride[d] + place[d] * dilation[d] - pads[d][0]
            index = index * sizes[d] + along
        index = jnp.broadcast_to(index, values.shape)
        if best is None:
            best, where = values, index
        else:
            better = (values > best) | jnp.isnan(values)
            best, where = jnp.where(better, values, best), jnp.where(better, index, where)
    assert best is not None
    return best, where


@lowers("aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward")
def _max_pool_gradient(call: Call, gradient: Array, x: Array, *rest: Any) -> Array:
    indices = rest[-1]
    rank = _pool_rank(call.node)
    planes, size = math.prod(x.shape[:-rank]), math.prod(x.shape[-rank:])
    flat = jnp.zeros((planes, size), call.wide)
    rows = jnp.arange(planes)[:, None]
    places, values = indices.reshape(planes, -1), cast(gradient, call.wide).reshape(planes, -1)
    return flat.at[rows, places].add(values, mode="drop").reshape(x.shape)


def _average(
    x: Array, out: Sequence[int], kernel: Any, stride: Any, padding: Any, count_padding: bool, divisor: int | None
) -> Array:
    kernel, stride, pads = _geometry(x, out, kernel, stride, padding)
    lead = x.ndim - len(out)
    window, steps = (1,) * lead + kernel, (1,) * lead + stride
    around = [(0, 0)] * lead + [(before, max(after, 0)) for before, after in pads]
    total = lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, steps, around)
    if divisor:
        return total / divisor
    # How many elements a window covers. Padding counts if asked for, but never what lies beyond it (ceil_mode).
    counts = np.ones((), np.float64)
    for n, o, k, s, (p, _) in zip(x.shape[lead:], out, kernel, stride, pads, strict=True):
        low, high = (-p, n + p) if count_padding else (0, n)
        starts = np.arange(o) * s - p
        counts = np.multiply.outer(counts, np.minimum(starts + k, high) - np.maximum(starts, low))
    return total / jnp.asarray(counts, x.dtype)


@lowers("aten::avg_pool2d", "aten::avg_pool3d", when=_is_real)
def _avg_pool(
    call: Call, x: Array, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, count: bool, divisor: int | None
) -> Array:
    out = call.type.sizes[-_pool_rank(call.node) :]
    return _average(cast(x, call.wide), out, kernel, stride, padding, count, divisor)


@lowers("aten::avg_pool2d_backward", "aten::avg_pool3d_backward", when=_is_real)
def _avg_pool_gradient(
    call: Call,
    gradient: Array,
    x: Array,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count: bool,
    divisor: int | None,
) -> Array:
    out = gradient.shape[-_pool_rank(call.node) :]
    forward = lambda x: _average(x, out, kernel, stride, padding, count, divisor)  # noqa: E731 - to be transposed
    (result,) = jax.linear_transpose(forward, cast(x, call.wide))(cast(gradient, call.wide))
    return result


def _shares(size: int, out: int) -> Any:
    """The matrix that averages `size` elements into `out` windows, as adaptive pooling cuts them."""
    shares = np.zeros((out, size))
    for k in range(out):
        start, end = k * size // out, -(-(k + 1) * size // out)
        shares[k, start:end] = 1 / (end - start)
    return shares


def _spread(x: Array, matrices: Sequence[Any]) -> Array:
    """Each of the last dimensions multiplied by its matrix."""
    for d, matrix in zip(range(-len(matrices), 0), matrices, strict=True):
        x = jnp.moveaxis(matmul(jnp.moveaxis(x, d, -1), jnp.asarray(matrix.T, x.dtype)), -1, d)
    return x


@lowers("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d", when=_is_real)
def _adaptive_avg_pool(call: Call, x: Array, out: Sequence[int]) -> Array:
    sizes = x.shape[-len(out) :]
    return _spread(cast(x, call.wide), [_shares(size, o) for size, o in zip(sizes, out, strict=True)])


@lowers("aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward", when=_is_real)
def _adaptive_avg_pool_gradient(call: Call, gradient: Array, x: Array) -> Array:
    rank = _pool_rank(call.node)
    pairs = zip(x.shape[-rank:], gradient.shape[-rank:], strict=True)
    return _spread(cast(gradient, call.wide), [_shares(size, out).T for size, out in pairs])
