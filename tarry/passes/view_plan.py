"""Which view operators lead from one layout to another.

The recorder knows a view as (dtype, sizes, strides, offset); a compiler wants `permute`, `slice`, `view`. `plan_view`
finds a short chain of view operators between two layouts. How it got there does not matter for correctness: every
step's layout is computed by the rules in `ir.layout`, and a chain is only returned if it ends in the wanted layout.
`aten::as_strided` is the last resort.

The idea: a wanted dimension (size n, stride t) walks through the base's memory in steps of t, so in the base's mixed
radix of strides it stays within one dimension (a slice with a step), or covers several neighbouring ones (which must be
merged by a `view` first), or shares one with other wanted dimensions (which must be split). Offsets give the starting
coordinate in each dimension. What is left over are dimensions to select from, to permute, to insert and to expand.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from tarry.ir.layout import REAL_OF, Ints, Layout, extent, is_dense, memory_order, view_layout


@dataclass(frozen=True, slots=True)
class Step:
    """One view operator: `args` without the tensor itself, and the layout it leads to."""

    op: str
    args: tuple[Any, ...]
    result: Layout


class _NoPlanError(Exception):
    """This way of planning has no result; another may have one."""


@functools.lru_cache(maxsize=8192)
def plan_view(base: Layout, want: Layout) -> tuple[Step, ...] | None:
    """A chain of view operators from `base`, which must start at offset 0, to `want`. None if there is none, which only
    happens when bytes are reinterpreted in ways PyTorch has no view for. `want` must have elements."""
    chain = _Chain(base)
    try:
        _plan(chain, want)
    except _NoPlanError:
        return None
    return tuple(chain.steps)


class _Chain:
    """A chain under construction. Steps that would change nothing are not added."""

    def __init__(self, start: Layout) -> None:
        self.layout = start
        self.steps: list[Step] = []

    def add(self, op: str, *args: Any) -> None:
        result = view_layout(op, self.layout, args)
        if result is None:
            raise _NoPlanError
        self.layout = result
        self.steps.append(Step(op, args, result))

    def permute(self, dims: Ints) -> None:
        if dims != tuple(range(len(dims))):
            self.add("aten::permute", dims)

    def view(self, sizes: Ints) -> None:
        if sizes != self.layout.sizes:
            self.add("aten::view", sizes)

    def slice(self, dim: int, start: int, length: int, step: int) -> None:
        if (start, length, step) != (0, self.layout.sizes[dim], 1):
            self.add("aten::slice.Tensor", dim, start, min(start + length * step, self.layout.sizes[dim]), step)

    def attempt(self, make: Any, *args: Any) -> bool:
        """Run a way of planning; take it back if it fails."""
        before, length = self.layout, len(self.steps)
        try:
            make(self, *args)
        except _NoPlanError:
            self.layout = before
            del self.steps[length:]
            return False
        return True


def _plan(chain: _Chain, want: Layout) -> None:
    if chain.layout.dtype == want.dtype:
        _plan_same_dtype(chain, want)
    else:
        _plan_dtype(chain, want)
    if not chain.layout.matches(want):
        raise _NoPlanError


# --- another dtype: reinterpret first or last, so that everything between is index arithmetic ------------------------


def _plan_dtype(chain: _Chain, want: Layout) -> None:
    have = chain.layout.dtype
    if have.is_complex and not want.dtype.is_complex:
        chain.add("aten::view_as_real")
        _plan(chain, want)
    elif want.dtype.is_complex and not have.is_complex:
        _plan(chain, _refined(want, REAL_OF[want.dtype], 2))
        _reinterpret(chain, "aten::view_as_complex")
    elif have.itemsize == want.dtype.itemsize:
        chain.add("aten::view.dtype", want.dtype)
        _plan(chain, want)
    elif have.itemsize > want.dtype.itemsize:
        chain.permute(memory_order(chain.layout.sizes, chain.layout.strides))
        sizes, strides = chain.layout.sizes, chain.layout.strides
        if not sizes:
            chain.add("aten::unsqueeze", 0)
        elif strides[-1] != 1 and is_dense(sizes, strides):
            chain.view((math.prod(sizes),))
        elif strides[-1] != 1:
            chain.add("aten::as_strided", (extent(sizes, strides),), (1,), 0)
        chain.add("aten::view.dtype", want.dtype)
        _plan(chain, want)
    else:
        ratio = want.dtype.itemsize // have.itemsize
        _plan(chain, _refined(want, have, ratio))
        _reinterpret(chain, "aten::view.dtype", want.dtype)
        chain.add("aten::squeeze.dim", len(want.sizes))


def _reinterpret(chain: _Chain, op: str, *args: Any) -> None:
    """Elements of a bigger dtype. PyTorch wants every stride divisible, those of dimensions of size 1 too, which may be
    anything: a view of the same sizes gives them the strides of their neighbours."""
    if not chain.attempt(_Chain.add, op, *args):
        chain.add("aten::view", chain.layout.sizes)
        chain.add(op, *args)


def _refined(want: Layout, dtype: torch.dtype, ratio: int) -> Layout:
    """The layout of the same bytes as `ratio` elements of a smaller dtype each, in a new last dimension."""
    return Layout(dtype, (*want.sizes, ratio), (*(t * ratio for t in want.strides), 1), want.offset * ratio)


# --- one dtype --------------------------------------------------------------------------------------------------------


def _plan_same_dtype(chain: _Chain, want: Layout) -> None:
    if chain.layout.matches(want):
        return
    for way in (_by_view, _by_diagonal, _by_index):
        if chain.attempt(way, want):
            return
    chain.add("aten::as_strided", want.sizes, want.strides, want.offset)


def _by_view(chain: _Chain, want: Layout) -> None:
    chain.view(want.sizes)
    _arrived(chain, want)


def _by_diagonal(chain: _Chain, want: Layout) -> None:
    base = chain.layout
    rank = len(base.sizes)
    coordinates = _coordinates(base, want)
    for n, t in zip(want.sizes, want.strides, strict=True):
        for i, j in itertools.combinations(range(rank), 2):
            a, b = base.strides[i], base.strides[j]
            if n > 1 and a and b and a + b == t and t % max(a, b):  # else it is a slice with a step
                start = coordinates.get(j, 0) - coordinates.get(i, 0)
                if chain.attempt(_diagonal_then_index, (start, i, j), want):
                    return
    raise _NoPlanError


def _diagonal_then_index(chain: _Chain, diagonal: tuple[int, int, int], want: Layout) -> None:
    chain.add("aten::diagonal", *diagonal)
    if not chain.layout.matches(want):
        _by_index(chain, want)


def _arrived(chain: _Chain, want: Layout) -> None:
    if not chain.layout.matches(want):
        raise _NoPlanError


def _walked(layout: Layout) -> list[int]:
    """The dimensions that move in memory, slowest first."""
    return [d for d in memory_order(layout.sizes, layout.strides) if layout.sizes[d] > 1 and layout.strides[d] > 0]


def _coordinates(base: Layout, want: Layout) -> dict[int, int]:
    """Where in each moving dimension of the base the wanted layout starts."""
    rest = want.offset - base.offset
    found: dict[int, int] = {}
    for d in _walked(base):
        found[d], rest = divmod(rest, base.strides[d])
        if not 0 <= found[d] < base.sizes[d]:
            raise _NoPlanError
    if rest:
        raise _NoPlanError
    return found


@dataclass(slots=True)
class _Axis:
    """A dimension of the (reshaped) base: where to start in it, and the wanted dimension it becomes, if any."""

    size: int
    stride: int
    start: int
    target: int | None = None
    length: int = 1
    step: int = 1


@dataclass(slots=True)
class _Group:
    """Neighbouring dimensions of the base in memory order, `first` to `last`, and the wanted dimensions within."""

    first: int
    last: int
    targets: list[int]


def _by_index(chain: _Chain, want: Layout) -> None:
    base = chain.layout
    walked = _walked(base)
    coordinates = _coordinates(base, want)
    groups = _groups(base, want, walked, coordinates)
    if all(group.first == group.last and len(group.targets) == 1 for group in groups):
        axes = [_Axis(base.sizes[d], base.strides[d], coordinates.get(d, 0)) for d in range(len(base.sizes))]
        for group in groups:
            (target,) = group.targets
            axis = axes[walked[group.first]]
            axis.target, axis.length = target, want.sizes[target]
            axis.step = want.strides[target] // axis.stride
    else:
        axes = _reshaped(chain, want, walked, coordinates, groups)
    _adopt(axes, want)
    _cut(chain, axes)
    _arrange(chain, axes, want)
    _arrived(chain, want)


def _groups(base: Layout, want: Layout, walked: list[int], coordinates: dict[int, int]) -> list[_Group]:
    """For each wanted dimension that moves, the dimensions of the base that it covers; those that meet are united."""
    groups: list[_Group] = []
    for target, (n, t) in enumerate(zip(want.sizes, want.strides, strict=True)):
        if n == 1 or t == 0:
            continue
        outer = next((k for k, d in enumerate(walked) if base.strides[d] <= t), None)
        if outer is None:
            raise _NoPlanError
        first = last = outer
        while t % base.strides[walked[last]]:
            last += 1
            if last == len(walked):
                raise _NoPlanError
        while True:
            inside = sum(coordinates[d] * base.strides[d] for d in walked[first : last + 1])
            if inside + (n - 1) * t < base.sizes[walked[first]] * base.strides[walked[first]]:
                break
            first -= 1
            if first < 0:
                raise _NoPlanError
        groups.append(_Group(first, last, [target]))
    groups.sort(key=lambda group: (group.first, group.last))
    united: list[_Group] = []
    for group in groups:
        if united and group.first <= united[-1].last:
            united[-1].last = max(united[-1].last, group.last)
            united[-1].targets += group.targets
        else:
            united.append(group)
    return united


def _reshaped(
    chain: _Chain, want: Layout, walked: list[int], coordinates: dict[int, int], groups: list[_Group]
) -> list[_Axis]:
    """Bring the base into memory order, merge each group into one dimension, and split that among its targets."""
    base = chain.layout
    if any(size > 1 and stride == 0 for size, stride in zip(base.sizes, base.strides, strict=True)):
        raise _NoPlanError
    chain.permute(memory_order(base.sizes, base.strides))
    grouped = {k for group in groups for k in range(group.first, group.last + 1)}
    parts = [*groups, *(_Group(k, k, []) for k in range(len(walked)) if k not in grouped)]
    parts.sort(key=lambda part: part.first)

    merged: list[_Axis] = []
    for part in parts:
        dims = walked[part.first : part.last + 1]
        unit = base.strides[dims[-1]]
        start = sum(coordinates[d] * base.strides[d] for d in dims)
        if start % unit:
            raise _NoPlanError
        merged.append(_Axis(math.prod(base.sizes[d] for d in dims), unit, start // unit))

    cuts: list[tuple[int, int, int]] = []  # slices needed before a dimension can be split
    axes: list[_Axis] = []
    for k, (part, axis) in enumerate(zip(parts, merged, strict=True)):
        targets = sorted(part.targets, key=lambda target: -want.strides[target])
        pieces = _split(axis, targets, want)
        if pieces is None:
            length = want.sizes[targets[0]] * (want.strides[targets[0]] // axis.stride)
            if axis.start + length > axis.size:
                raise _NoPlanError
            cuts.append((k, axis.start, length))
            pieces = _split(_Axis(length, axis.stride, 0), targets, want)
            if pieces is None:
                raise _NoPlanError
        axes.extend(pieces)
    if cuts:
        chain.view(tuple(axis.size for axis in merged))
        for k, start, length in cuts:
            chain.slice(k, start, length, 1)
    chain.view(tuple(axis.size for axis in axes))
    return axes


def _split(axis: _Axis, targets: list[int], want: Layout) -> list[_Axis] | None:
    """A dimension as one axis per target (slowest first), or None if their strides do not nest in its size."""
    if not targets:
        return [axis]
    rest, start = axis.size, axis.start
    pieces: list[_Axis] = []
    for k, target in enumerate(targets):
        step = want.strides[target] // axis.stride
        if k == len(targets) - 1:
            pieces.append(_Axis(rest, axis.stride, start, target, want.sizes[target], step))
        elif step == 0 or rest % step:
            return None
        else:
            pieces.append(_Axis(rest // step, axis.stride * step, start // step, target, want.sizes[target], 1))
            rest, start = step, start % step
    if any(piece.start + (piece.length - 1) * piece.step >= piece.size for piece in pieces):
        return None
    return pieces


def _adopt(axes: list[_Axis], want: Layout) -> None:
    """Let axes that would be selected away become wanted dimensions of size 1 (or expanded ones) where the order allows
    it: `x[:, 1:2]` is a slice, not a select and an unsqueeze."""
    free = {d for d, (n, t) in enumerate(zip(want.sizes, want.strides, strict=True)) if n == 1 or t == 0}
    for k, axis in enumerate(axes):
        if axis.target is not None:
            continue
        before = max((other.target for other in axes[:k] if other.target is not None), default=-1)
        after = min((other.target for other in axes[k + 1 :] if other.target is not None), default=len(want.sizes))
        between = [d for d in sorted(free) if before < d < after]
        same = [d for d in between if want.sizes[d] == 1 and want.strides[d] == axis.stride]
        chosen = same or (between if axis.size == 1 else [])
        if chosen:
            axis.target = chosen[0]
            free.discard(chosen[0])


def _cut(chain: _Chain, axes: list[_Axis]) -> None:
    """Slice the axes that stay, select from those that go."""
    dim = 0
    for axis in axes:
        if axis.target is None:
            chain.add("aten::select.int", dim, axis.start)
        else:
            chain.slice(dim, axis.start, axis.length, axis.step)
            dim += 1


def _arrange(chain: _Chain, axes: list[_Axis], want: Layout) -> None:
    """Order what is there, insert the dimensions of size 1 that are missing, expand."""
    present = [axis.target for axis in axes if axis.target is not None]
    chain.permute(tuple(present.index(target) for target in sorted(present)))
    rank = len(want.sizes)
    expanded = [d for d in range(rank) if want.sizes[d] != 1 and want.strides[d] == 0]
    # expand itself adds leading dimensions
    leading = min(present, default=rank) if expanded else 0
    missing = [d for d in range(leading, rank) if d not in present]
    if len(missing) == 1:
        chain.add("aten::unsqueeze", missing[0] - leading)
    elif missing:
        chain.view(tuple(1 if d in missing or d in expanded else want.sizes[d] for d in range(leading, rank)))
    if expanded:
        chain.add("aten::expand", want.sizes, False)
