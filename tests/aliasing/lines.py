"""Strategies that write the next line of a program from what the CPU side holds now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.aliasing.world import World, overlaps_itself, overlaps_partly

T = TypeVar("T")

SHAPES = ((6,), (4, 3), (2, 3, 4), (3, 4), (2, 2, 3), (1, 5), (), (0, 3), (2, 1, 3, 2))
DTYPES = ("float64", "int64", "int32", "bool", "complex128", "float32")


class Writer:
    """Draws lines; every choice comes from hypothesis, so a failing program shrinks."""

    def __init__(self, world: World, data: st.DataObject, *, dtypes: tuple[str, ...] = DTYPES) -> None:
        self.world = world
        self.data = data
        self.dtypes = dtypes

    def _int(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def _pick(self, options: Sequence[T]) -> T:
        return self.data.draw(st.sampled_from(options))

    def name(self) -> str:
        return self._pick(self.world.names)

    def number(self, dtype: torch.dtype) -> str:
        if dtype == torch.bool:
            return str(self._pick((True, False)))
        if dtype.is_floating_point or dtype.is_complex:
            return self._pick(("0.5", "2", "-1.25", "3", "0"))
        return str(self._int(-3, 4))

    # Makers of tensors

    def base(self) -> None:
        """A new storage with distinct values."""
        shape, dtype = self._pick(SHAPES), self._pick(self.dtypes)
        count = 1
        for n in shape:
            count *= n
        name = self.world.fresh()
        source = f"torch.arange({count}, device=D).reshape({shape}).to(torch.{dtype})"
        if self._int(0, 3) == 0:
            source = f"torch.tensor({list(range(count))}, dtype=torch.{dtype}).reshape({shape}).to(D, copy=True)"
        self.world.run(f"{name} = {source}", (name,))

    def view(self) -> None:
        """A view by any of the view operators (or, for reshape and contiguous, perhaps a copy)."""
        source = self.name()
        text = self._pick(_VIEWS)(self, source, self.world[source])
        name = self.world.fresh()
        self.world.run(f"{name} = {text}", (name,))

    def pieces(self) -> None:
        """Two results of an operator that gives many."""
        source = self.name()
        t = self.world[source]
        if t.dim() == 0:
            return
        d = self._int(0, t.dim() - 1)
        text = self._pick(
            (
                f"{source}.split({self._int(1, 3)}, {d})",
                f"{source}.chunk({self._int(1, 3)}, {d})",
                f"{source}.unbind({d})",
                f"{source}.tensor_split({self._int(1, 3)}, {d})",
            )
        )
        a, b = self.world.fresh(), self.world.fresh()
        self.world.run(f"{a}, *_, {b} = {text}", (a, b))

    def copy(self) -> None:
        """New storage with the values of an old one."""
        source = self.name()
        text = self._pick(
            (
                "{0}.clone()",
                "{0} + {0}",
                "{0}.contiguous().clone()",
                "{0}.flip(0) if {0}.dim() else {0}.clone()",
                "torch.zeros_like({0})",
                "torch.cat([{0}.flatten(), {0}.flatten()])",
                "{0}.to(torch.float64) if not {0}.is_complex() else {0} * 2",
                "{0}.new_ones({0}.shape)",
                "torch.empty_like({0}).copy_({0})",
                "{0}.clone(memory_format=torch.contiguous_format)",
                "{0}.detach().clone().cpu().to(D)",
                "{0}.sum(0) if {0}.dim() else {0} * {0}",
            )
        ).format(source)
        name = self.world.fresh()
        self.world.run(f"{name} = {text}", (name,))

    # Writers

    def _may_write(self, target: str, *sources: str) -> bool:
        t = self.world[target]
        return not overlaps_itself(t) and not any(overlaps_partly(t, self.world[s]) for s in sources)

    def write_number(self) -> None:
        target = self.name()
        if not self._may_write(target):
            return
        value = self.number(self.world[target].dtype)
        line = self._pick(
            (
                f"{target}.add_({value})",
                f"{target}.mul_({value})",
                f"{target}.fill_({value})",
                f"{target}.zero_()",
                f"{target}.sub_({value})",
                f"{target}.neg_()",
                f"{target} += {value}",
                f"{target} *= {value}",
                f"{target}[...] = {value}",
                f"{target}.clamp_(min={value})",
                f"{target}.pow_(2)",
                f"{target}.data.add_({value})",
                f"{target}.detach().mul_({value})",
            )
        )
        if not (
            ".sub_" in line and self.world[target].dtype == torch.bool
        ):  # refused by the kernel, so only when it runs
            self.world.run(line)

    def write_tensor(self) -> None:
        target, source = self.name(), self.name()
        if not self._may_write(target, source):
            return
        line = self._pick(
            (
                f"{target}.copy_({source})",
                f"{target}.add_({source})",
                f"{target}.mul_({source})",
                f"{target}[...] = {source}",
                f"{target}.sub_({source}, alpha=2)",
                f"torch.add({source}, 1, out={target})",
                f"torch.mul({source}, {source}, out={target})",
                f"{target}.copy_({source}.sum())",
                f"torch.neg({source}, out={target})",
            )
        )
        if "out=" in line and self.world[target].shape != self.world[source].shape:
            return  # out= would resize a view, which eager deprecates with a warning
        if ".sub_" in line and self.world[target].dtype == torch.bool:
            return  # as above
        self.world.run(line)

    def write_part(self) -> None:
        """Through an index: slices, integers, lists, masks."""
        target = self.name()
        t = self.world[target]
        if t.dim() == 0 or t.shape[0] == 0 or not self._may_write(target):
            return
        n = t.shape[0]
        i, value = self._int(-n, n - 1), self.number(t.dtype)
        rows = self.data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=3, unique=True))
        line = self._pick(
            (
                f"{target}[{i}] = {value}",
                f"{target}[{i}:] = {value}",
                f"{target}[::2] = {value}",
                f"{target}[{rows}] = {value}",
                f"{target}[..., -1:] = {value}",
                f"{target}[{target} == {value}] = {value}",
                f"{target}.masked_fill_({target} != {value}, {value})",
                f"{target}[torch.tensor({rows}, device=D)] += {value}",
                f"{target}.index_fill_(0, torch.tensor({rows}, device=D), {value})",
                f"{target}.index_put_((torch.tensor({rows}, device=D),), {target}.new_full((), {value}), True)",
                f"{target}.index_copy_(0, torch.tensor({rows}, device=D), {target}[{rows}].flip(0).clone())",
                f"{target}[1:] = {target}[:-1].clone()",
            )
        )
        self.world.run(line)

    # Everything else

    def metadata(self) -> None:
        """In place, but on sizes and strides or on the storage a tensor points to."""
        target, other = self.name(), self.name()
        t = self.world[target]
        lines = [f"{target}.unsqueeze_(0)", f"{target}.squeeze_()", f"{target}.detach_()"]
        if t.dim() >= 2:
            lines += [f"{target}.transpose_(0, 1)", f"{target}.swapdims_(0, -1)"]
        if t.dtype == self.world[other].dtype:
            lines += [f"{target}.data = {other}", f"{target}.set_({other})", f"{target}.data = {other}.clone()"]
        if t.dim() > 6:
            return
        self.world.run(self._pick(lines))

    def sync(self) -> None:
        source = self.name()
        kind = self._int(0, 3)
        if kind == 0:
            self.world.run("cut()")
        elif kind == 1:
            self.world.check_value(source)
        elif self.world[source].numel() and self.world.usable(source):
            text = f"{source}.flatten()[-1].item()" if kind == 2 else f"{source}.tolist()"
            if self.world.run(f"r = {text}"):
                self.world.check_variable("r")

    def drop(self) -> None:
        if len(self.world.names) > 1:
            self.world.drop(self.name())


def _dim(w: Writer, t: Tensor) -> int:
    return w._int(-t.dim(), t.dim() - 1) if t.dim() else 0


def _slice(w: Writer, s: str, t: Tensor) -> str:
    if t.dim() == 0:
        return f"{s}[None]"
    parts = []
    for n in t.shape:
        kind = w._int(0, 4)
        start, stop, step_ = w._int(-n - 1, n), w._int(-n - 1, n + 2), w._int(1, 3)
        parts.append((":", f"{start}:{stop}", f"::{step_}", "None, :", f"{start}::{step_}")[kind])
    return f"{s}[{', '.join(parts)}]"


def _select(w: Writer, s: str, t: Tensor) -> str:
    if t.dim() == 0:
        return f"{s}[...]"
    d = w._int(0, t.dim() - 1)
    n = max(t.shape[d], 1)
    return f"{s}.select({d}, {w._int(-n, n - 1)})"


def _expand(w: Writer, s: str, t: Tensor) -> str:
    sizes = [w._int(1, 3) if n == 1 else -1 for n in t.shape]
    return f"{s}.expand({[2, *sizes] if w._int(0, 1) and t.dim() < 5 else sizes})"


def _reshape(w: Writer, s: str, t: Tensor) -> str:
    shapes: list[tuple[int, ...]] = [(-1,), (t.numel(),), (1, *t.shape), (*t.shape, 1)]
    shapes += [(d, t.numel() // d) for d in (2, 3) if t.numel() % d == 0 and t.numel()]
    shape = w._pick([x for x in shapes if not (-1 in x and t.numel() == 0)])
    return f"{s}.{w._pick(('reshape', 'view'))}({shape})"


def _unfold(w: Writer, s: str, t: Tensor) -> str:
    if t.dim() == 0 or t.dim() > 4:
        return f"{s}.view_as({s})"
    d = w._int(0, t.dim() - 1)
    return f"{s}.unfold({d}, {w._int(1, max(t.shape[d], 1))}, {w._int(1, 2)})"


def _diagonal(w: Writer, s: str, t: Tensor) -> str:
    return f"{s}.diagonal({w._int(-1, 1)}, 0, -1)" if t.dim() >= 2 else f"{s}.detach()"


def _strided(w: Writer, s: str, t: Tensor) -> str:
    """Some window of the storage that fits into it."""
    length = t.untyped_storage().nbytes() // t.element_size()
    if length < 2:
        return f"{s}.as_strided({tuple(t.shape)}, {t.stride()})"
    rows, columns = w._int(1, 3), w._int(1, 3)
    row_step, column_step = w._int(0, 3), w._int(0, 2)
    last = (rows - 1) * row_step + (columns - 1) * column_step
    offset = w._int(0, max(length - 1 - last, 0))
    return f"{s}.as_strided(({rows}, {columns}), ({row_step}, {column_step}), {offset})"


def _complex(w: Writer, s: str, t: Tensor) -> str:
    if t.is_complex():
        return w._pick((f"torch.view_as_real({s})", f"{s}.real", f"{s}.imag", f"{s}.conj()"))
    if t.dtype in (torch.float64, torch.float32):
        return f"torch.view_as_complex({s})"
    return f"{s}.view({s}.dtype)"


def _bits(w: Writer, s: str, t: Tensor) -> str:
    other = {"torch.float64": "int64", "torch.int64": "float64", "torch.float32": "int32", "torch.int32": "float32"}
    return f"{s}.view(torch.{other[str(t.dtype)]})" if str(t.dtype) in other else f"{s}.view({s}.dtype)"


_VIEWS: tuple[Callable[[Writer, str, Tensor], str], ...] = (
    lambda w, s, t: f"{s}.transpose({_dim(w, t)}, {_dim(w, t)})",
    lambda w, s, t: f"{s}.permute({w.data.draw(st.permutations(range(t.dim())))})",
    _slice,
    _slice,
    _select,
    _expand,
    _reshape,
    _reshape,
    _unfold,
    _diagonal,
    _strided,
    _complex,
    _bits,
    lambda w, s, t: f"{s}.unsqueeze({w._int(-t.dim() - 1, t.dim())})" if t.dim() < 5 else f"{s}.squeeze()",
    lambda w, s, t: f"{s}.squeeze()",
    lambda w, s, t: f"{s}.flatten()",
    lambda w, s, t: f"{s}.detach()",
    lambda w, s, t: f"{s}.data",
    lambda w, s, t: f"{s}.contiguous()",
    lambda w, s, t: f"{s}.narrow(0, 0, {w._int(0, 2)})" if t.dim() else f"{s}[None]",
    lambda w, s, t: f"{s}.movedim(0, -1)" if t.dim() else f"{s}.view(1)",
)
