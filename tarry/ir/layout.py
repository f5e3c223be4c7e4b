"""How the elements of a tensor lie in a buffer, and what each view operator does to that.

tarry records no view operators: a tensor is a storage plus (dtype, sizes, strides, offset), and reading it through
another layout is an edge of the graph. Everything that later reasons about views (bounds in the verifier, recovery of
clean view operators, scatter of written views) is therefore arithmetic on layouts, and this file is that arithmetic.
It needs no tensors, so a recovered chain of view operators is *proved* by computing its layout and comparing.

Offsets and strides count elements of the layout's own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Ints = tuple[int, ...]


def contiguous_strides(sizes: Ints) -> Ints:
    """The strides PyTorch gives a fresh contiguous tensor (a dimension of size 0 counts as 1)."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def channels_last_strides(sizes: Ints) -> Ints | None:
    """The strides of torch.channels_last (rank 4) or channels_last_3d (rank 5); None for other ranks."""
    if len(sizes) not in (4, 5):
        return None
    order = (0, *range(2, len(sizes)), 1)
    packed = contiguous_strides(tuple(sizes[d] for d in order))
    strides = [0] * len(sizes)
    for stride, d in zip(packed, order, strict=True):
        strides[d] = stride
    return tuple(strides)


def extent(sizes: Ints, strides: Ints) -> int:
    """Elements from the first to the last one that the layout touches, both included; 0 if it has no elements."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def same_addresses(sizes: Ints, a: Ints, b: Ints) -> bool:
    """Whether two strides put every index at the same place: strides of dimensions of size 1 do not matter."""
    if a == b or 0 in sizes:
        return True
    return all(size == 1 or x == y for size, x, y in zip(sizes, a, b, strict=True))


def is_dense(sizes: Ints, strides: Ints) -> bool:
    """Whether the elements fill their extent without gap and without overlap (contiguous up to a permutation)."""
    if 0 in sizes:
        return True
    expected = 1
    for stride, size in sorted((t, s) for s, t in zip(sizes, strides, strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_injective(sizes: Ints, strides: Ints) -> bool:
    """Whether no two indices surely share an element: a sufficient test, which every composition of slices passes."""
    if 0 in sizes:
        return True
    reach = 1
    for stride, size in sorted((t, s) for s, t in zip(sizes, strides, strict=True) if s != 1):
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def memory_order(sizes: Ints, strides: Ints) -> Ints:
    """The dimensions from the slowest to the fastest varying one. Dimensions of size 1 keep their place relative to
    their right neighbour, so that a contiguous layout is in memory order whatever those strides are."""
    keys: list[tuple[int, int]] = []
    stride_right = 0
    for d in reversed(range(len(sizes))):
        if sizes[d] != 1:
            stride_right = strides[d]
        keys.append((-stride_right, d))
    return tuple(d for _, d in sorted(keys))


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of a value: the layout its own buffer has. The first element is at the start of the buffer."""

    dtype: torch.dtype
    sizes: Ints
    strides: Ints

    @staticmethod
    def contiguous(dtype: torch.dtype, sizes: Ints) -> TensorType:
        return TensorType(dtype, sizes, contiguous_strides(sizes))

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorType:
        return TensorType(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def extent(self) -> int:
        return extent(self.sizes, self.strides)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that the layout reaches."""
        return self.extent * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        return same_addresses(self.sizes, self.strides, contiguous_strides(self.sizes))

    @property
    def is_dense(self) -> bool:
        return is_dense(self.sizes, self.strides)

    def matches(self, other: TensorType) -> bool:
        """Equal up to the strides of dimensions of size 1, which no program can observe through the elements."""
        return (
            self.dtype == other.dtype
            and self.sizes == other.sizes
            and same_addresses(self.sizes, self.strides, other.strides)
        )

    def at(self, offset: int = 0) -> Layout:
        return Layout(self.dtype, self.sizes, self.strides, offset)


@dataclass(frozen=True, slots=True)
class Layout:
    """A window on a buffer: a type and where it starts."""

    dtype: torch.dtype
    sizes: Ints
    strides: Ints
    offset: int = 0

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.sizes, self.strides)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def matches(self, other: Layout) -> bool:
        """Whether both windows show the same elements in the same places."""
        return self.type.matches(other.type) and (self.offset == other.offset or 0 in self.sizes)

    @property
    def byte_range(self) -> tuple[int, int]:
        """First byte touched and the byte after the last one; empty (0, 0) if there are no elements."""
        reach = extent(self.sizes, self.strides)
        if reach == 0:
            return (0, 0)
        size = self.dtype.itemsize
        return (self.offset * size, (self.offset + reach) * size)

    def fits(self, buffer: TensorType) -> bool:
        """Whether the window lies within the buffer of a value of that type."""
        start, end = self.byte_range
        return start >= 0 and end <= buffer.nbytes


def disjoint(a: Layout, b: Layout) -> bool:
    """Whether two windows on one buffer surely share no element; False may mean 'not known'.

    Two tests, which between them settle slices and selects of a dense buffer: the byte ranges do not meet; or, modulo
    some stride that both have, they do not meet (two column ranges of a matrix).
    """
    (a0, a1), (b0, b1) = a.byte_range, b.byte_range
    if a1 <= b0 or b1 <= a0:
        return True
    if a.dtype.itemsize != b.dtype.itemsize:
        return False
    moduli = {*a.strides, *b.strides} - {0, 1}
    return any(_disjoint_modulo(a, b, modulus) for modulus in moduli)


def _disjoint_modulo(a: Layout, b: Layout, modulus: int) -> bool:
    ranges = []
    for layout in (a, b):
        inner = 1 + sum(
            (size - 1) * stride
            for size, stride in zip(layout.sizes, layout.strides, strict=True)
            if stride % modulus and size > 1
        )
        start = layout.offset % modulus
        if start + inner > modulus:  # wraps around: says nothing
            return False
        ranges.append((start, start + inner))
    (a0, a1), (b0, b1) = ranges
    return a1 <= b0 or b1 <= a0


# --- what each view operator does to a layout --------------------------------------------------------------------
# One function per operator that the passes may emit. Each takes the layout and the operator's other arguments in
# schema order and returns the layout of the result, or None where PyTorch would refuse the view.


def _permute(x: Layout, dims: Ints) -> Layout | None:
    if sorted(dims) != list(range(len(x.sizes))):
        return None
    return Layout(x.dtype, tuple(x.sizes[d] for d in dims), tuple(x.strides[d] for d in dims), x.offset)


def _view(x: Layout, sizes: Ints) -> Layout | None:
    if math.prod(sizes) != x.numel or any(size < 0 for size in sizes):
        return None
    if x.numel == 0:
        return Layout(x.dtype, sizes, x.strides if sizes == x.sizes else contiguous_strides(sizes), x.offset)
    # Runs of dimensions that are contiguous among themselves, slowest first, each as (elements, stride of its last).
    # New dimensions must cut every run exactly. Dimensions of size 1 belong to any run.
    runs: list[tuple[int, int]] = []
    for size, stride in zip(x.sizes, x.strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    if not runs:
        # One element. PyTorch derives the strides from the last dimension's.
        runs = [(1, x.strides[-1] if x.strides else 1)]
    strides: list[int] = []
    count, last = runs.pop()
    filled = 1
    for size in reversed(sizes):
        if size != 1 and filled == count:
            if not runs:
                return None
            count, last = runs.pop()
            filled = 1
        strides.append(filled * last)
        filled *= size
        if count % filled:
            return None
    return Layout(x.dtype, sizes, tuple(reversed(strides)), x.offset)


def _slice(x: Layout, dim: int, start: int | None, end: int | None, step: int) -> Layout | None:
    if not 0 <= dim < len(x.sizes) or step < 1:
        return None
    size = x.sizes[dim]
    first = 0 if start is None else start
    last = size if end is None else end
    first = min(max(first + size if first < 0 else first, 0), size)
    last = min(max(last + size if last < 0 else last, first), size)
    length = -(-(last - first) // step)
    sizes = (*x.sizes[:dim], length, *x.sizes[dim + 1 :])
    strides = (*x.strides[:dim], x.strides[dim] * step, *x.strides[dim + 1 :])
    return Layout(x.dtype, sizes, strides, x.offset + first * x.strides[dim])


def _select(x: Layout, dim: int, index: int) -> Layout | None:
    if not 0 <= dim < len(x.sizes) or not -x.sizes[dim] <= index < x.sizes[dim]:
        return None
    index += x.sizes[dim] if index < 0 else 0
    return Layout(
        x.dtype,
        x.sizes[:dim] + x.sizes[dim + 1 :],
        x.strides[:dim] + x.strides[dim + 1 :],
        x.offset + index * x.strides[dim],
    )


def _expand(x: Layout, sizes: Ints, implicit: bool = False) -> Layout | None:
    new = len(sizes) - len(x.sizes)
    if new < 0:
        return None
    strides: list[int] = []
    for d in reversed(range(len(sizes))):
        old = x.sizes[d - new] if d >= new else 1
        if d >= new and sizes[d] == old:
            strides.append(x.strides[d - new])
        elif old != 1 or sizes[d] < 0:
            return None
        elif d < new and sizes[d] == 1:
            strides.append(sizes[d + 1] * strides[-1] if d + 1 < len(sizes) else 1)
        else:
            strides.append(0)
    return Layout(x.dtype, sizes, tuple(reversed(strides)), x.offset)


def _unsqueeze(x: Layout, dim: int) -> Layout | None:
    if not 0 <= dim <= len(x.sizes):
        return None
    stride = x.sizes[dim] * x.strides[dim] if dim < len(x.sizes) else 1
    return Layout(x.dtype, (*x.sizes[:dim], 1, *x.sizes[dim:]), (*x.strides[:dim], stride, *x.strides[dim:]), x.offset)


def _squeeze(x: Layout, dim: int) -> Layout | None:
    if not x.sizes and dim == 0:
        return x
    if not 0 <= dim < len(x.sizes):
        return None
    if x.sizes[dim] != 1:
        return x
    return Layout(x.dtype, x.sizes[:dim] + x.sizes[dim + 1 :], x.strides[:dim] + x.strides[dim + 1 :], x.offset)


def _diagonal(x: Layout, offset: int, dim1: int, dim2: int) -> Layout | None:
    rank = len(x.sizes)
    if not (0 <= dim1 < rank and 0 <= dim2 < rank) or dim1 == dim2:
        return None
    row, column = max(-offset, 0), max(offset, 0)
    length = max(min(x.sizes[dim1] - row, x.sizes[dim2] - column), 0)
    rest = [d for d in range(rank) if d not in (dim1, dim2)]
    start = row * x.strides[dim1] + column * x.strides[dim2] if length else 0
    return Layout(
        x.dtype,
        (*(x.sizes[d] for d in rest), length),
        (*(x.strides[d] for d in rest), x.strides[dim1] + x.strides[dim2]),
        x.offset + start,
    )


def _as_strided(x: Layout, sizes: Ints, strides: Ints, offset: int | None = None) -> Layout | None:
    if len(sizes) != len(strides) or any(stride < 0 for stride in strides):
        return None
    return Layout(x.dtype, sizes, strides, x.offset if offset is None else offset)


def _view_dtype(x: Layout, dtype: torch.dtype) -> Layout | None:
    old, new = x.dtype.itemsize, dtype.itemsize
    if old == new:
        return Layout(dtype, x.sizes, x.strides, x.offset)
    if not x.sizes:
        return None
    if old > new:
        ratio = old // new
        if x.strides[-1] != 1:
            return None
        sizes = (*x.sizes[:-1], x.sizes[-1] * ratio)
        return Layout(dtype, sizes, (*(t * ratio for t in x.strides[:-1]), 1), x.offset * ratio)
    ratio = new // old
    if x.sizes[-1] % ratio or x.offset % ratio or x.strides[-1] != 1 or any(t % ratio for t in x.strides[:-1]):
        return None
    sizes = (*x.sizes[:-1], x.sizes[-1] // ratio)
    return Layout(dtype, sizes, (*(t // ratio for t in x.strides[:-1]), 1), x.offset // ratio)


REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
COMPLEX_OF = {real: complex_ for complex_, real in REAL_OF.items()}


def _view_as_real(x: Layout) -> Layout | None:
    if x.dtype not in REAL_OF:
        return None
    return Layout(REAL_OF[x.dtype], (*x.sizes, 2), (*(2 * t for t in x.strides), 1), 2 * x.offset)


def _view_as_complex(x: Layout) -> Layout | None:
    if x.dtype not in COMPLEX_OF or not x.sizes or x.sizes[-1] != 2 or x.strides[-1] != 1:
        return None
    if x.offset % 2 or any(t % 2 for t in x.strides[:-1]):
        return None
    return Layout(COMPLEX_OF[x.dtype], x.sizes[:-1], tuple(t // 2 for t in x.strides[:-1]), x.offset // 2)


VIEW_RULES: dict[str, Callable[..., Layout | None]] = {
    "aten::permute": _permute,
    "aten::view": _view,
    "aten::slice.Tensor": _slice,
    "aten::select.int": _select,
    "aten::expand": _expand,
    "aten::unsqueeze": _unsqueeze,
    "aten::squeeze.dim": _squeeze,
    "aten::diagonal": _diagonal,
    "aten::as_strided": _as_strided,
    "aten::view.dtype": _view_dtype,
    "aten::view_as_real": _view_as_real,
    "aten::view_as_complex": _view_as_complex,
}
"""Every view operator a graph may contain. A closed set: a backend that knows these knows all views."""


def view_layout(op: str, x: Layout, args: tuple[Any, ...]) -> Layout | None:
    """The layout of `op(x, *args)`, or None if that view does not exist. `op` must be in VIEW_RULES."""
    return VIEW_RULES[op](x, *args)
