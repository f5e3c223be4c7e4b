"""Families: graphs that differ in integers only (sizes, strides, offsets, integer arguments: csrc/execute/outline.h).

From two members, or a few, comes a template (`template.py`), and from the template programs that take all sizes, or a
range of them: a compiler decides by the sizes at hand how it goes about a step.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tarry.backends.base import Backend, Batch, PythonNumber, Recording, Step
from tarry.ir.raw import RawGraph, with_integers
from tarry.ir.sizes import Symbols
from tarry.native import C
from tarry.runtime import limits
from tarry.runtime.compile.computations import is_family_stored
from tarry.runtime.entry import Entry, Reason, State
from tarry.runtime.sizes import template as templates
from tarry.runtime.sizes.template import Template, exemplary
from tarry.runtime.variants import Variants

log = logging.getLogger("tarry")


class Example(NamedTuple):
    """A member of a family as it was recorded once."""

    integers: list[int]
    numbers: list[PythonNumber]


@dataclass(eq=False)
class Family:
    """Graphs that differ in integers only, with what is known of them so far."""

    outline: C.Outline
    prepared: GraphEntry | None = None  # of a backend that takes graphs as they were recorded
    varies: bool = False
    """Members have come with several sizes, which programs for several sizes are to compute. The template may still be
    missing: it is looked for when it is worth it."""
    template: Template | None = None
    examples: list[Example] = field(default_factory=list)
    fitted: list[Example] = field(default_factory=list)  # what the template was made from
    ranges: list[Entry[Variants]] = field(default_factory=list)  # the last one may not be READY yet
    seconds: float = 0.0  # on the reference path
    runs: int = 0  # on the reference path, with this template or before there was any
    stored: bool | None = None  # whether a program for several sizes is in the store, if that is known
    attempts: int = 0  # to find a template
    failures: int = 0  # templates that the backend made no program of
    alone: int = 0  # members that no template fitted when they came for the first time
    fixed: int = 0  # programs compiled for fixed sizes
    warned: bool = False  # that there are enough of those

    @property
    def ready(self) -> bool:
        """Whether there is a program for several sizes."""
        return bool(self.ranges) and self.ranges[0].state is State.READY

    def meet(self, outline: C.Outline, numbers: list[PythonNumber]) -> None:
        """Take note of a member of new sizes that no template fits."""
        if self.template is None and self.examples and self._may_vary:
            self.varies = True  # the second member; the template is looked for when it is worth it
        else:
            self.find_template(outline, numbers)

    def symbols(self, outline: C.Outline) -> Symbols | None:
        """The values of the symbols for a member; empty if there is no template yet; None if programs for several sizes
        are not meant for it."""
        if not self.varies:
            return None
        return () if self.template is None else self.template.match(outline)

    @property
    def _may_vary(self) -> bool:
        """Whether a template may still be found."""
        return self.attempts < limits.MAX_TEMPLATE_ATTEMPTS and self.failures < limits.MAX_TEMPLATE_FAILURES

    def find_template(self, outline: C.Outline, numbers: list[PythonNumber]) -> Symbols | None:
        """Look for a template that fits a member, since the present one does not. The values of its symbols."""
        found = self._better_template(Example(outline.integers, numbers)) if self._may_vary else None
        if found is None:
            self.varies = self.template is not None
            return None
        if self.template is not None:
            self.runs = 0
        self.template, self.varies, self.ranges = found, True, []
        return found.match(outline)

    def _better_template(self, example: Example) -> Template | None:
        self.attempts += 1
        earlier = [self.fitted, *([known] for known in reversed(self.examples))]
        self.examples = [*self.examples[1 - limits.MAX_EXAMPLES :], example]
        for examples in filter(None, earlier):
            fitted = [*examples, example]
            found = templates.find_template([each.integers for each in fitted], self.outline.ranks)
            if found is not None:
                self.fitted = fitted
                return found
        return None

    def is_due(self, backend: Backend) -> bool:
        """Whether members have come often enough, without a program, to be worth one."""
        if self.seconds < limits.FAMILY_SECONDS:
            return False
        if self.stored is None:
            self.stored = is_family_stored(backend, self.outline.key)
        return self.stored or self.runs >= limits.FAMILY_RUNS

    def open_range(self) -> Entry[Variants] | None:
        """The entry of sizes that no program is right for yet; None if there is to be no other program."""
        last = self.ranges[-1] if self.ranges else None
        if last is None or last.state is State.READY:
            if len(self.ranges) >= limits.MAX_RANGES:
                return None
            last = Entry()
            self.ranges.append(last)
        return None if last.state is State.REFUSED else last

    @property
    def has_met_many(self) -> bool:
        """Whether members that no template fits are more than there will be programs."""
        return self.alone > limits.MAX_FIXED_SIZES

    def give_up(self) -> None:
        """The backend makes no program of the template."""
        self.template, self.varies, self.fitted, self.ranges = None, False, [], []
        self.failures += 1

    def over_budget(self, batch: Batch) -> Reason | None:
        """Why a member gets no program for its own sizes: there are enough of those. Warns once."""
        if self.fixed < limits.MAX_FIXED_SIZES:
            return None
        what = f"{Recording(batch).describe()} was compiled for {limits.MAX_FIXED_SIZES} different sizes"
        if not self.warned:
            self.warned = True
            log.warning("tarry: %s; others run on the reference path", what)
        return Reason(what)

    def varied_numbers(self) -> set[int]:
        """The numbers that were not the same in all examples."""
        columns = zip(*(example.numbers for example in self.fitted), strict=True)
        return {index for index, column in enumerate(columns) if any(repr(n) != repr(column[0]) for n in column)}

    def describe(self, raw: RawGraph, symbols: Symbols) -> str:
        """What varies, for a line of the log: each symbol by where it comes from, what it was and what it is."""
        assert self.template is not None
        parts = []
        for position, now in zip(self.template.symbols, symbols, strict=True):
            seen = [example.integers[position] for example in reversed(self.fitted)]
            before = next((value for value in seen if value != now), now)
            parts.append(f"{_origin(raw, self.outline.ranks, position)} was {before} and is {now} now")
        return "; ".join(parts)


@dataclass(eq=False, slots=True)
class GraphEntry(Entry[Variants | Step]):
    """The entry of a graph at its own sizes."""

    family: Family | None = None
    """The graphs that differ from it in integers only, if there can be any."""
    own_sizes: bool = False
    """It gets a program for its own sizes, if any: those of its family are not right for it."""


class SizedRecording(Recording):
    """What compiling for several sizes needs of a batch: how it would have been recorded at some of them."""

    def __init__(self, batch: Batch, family: Family, symbols: Symbols) -> None:
        super().__init__(batch)
        self.take()
        assert family.template is not None
        self.template = family.template
        self.outline = family.outline.key
        self.varied_numbers = frozenset(family.varied_numbers())
        self.why = family.describe(self.raw, symbols)
        self.symbols = symbols
        self.exemplars = exemplary(self.template, symbols, limits.EXEMPLARS)
        self.raws = [with_integers(self.raw, self.template.integers(each)) for each in self.exemplars]


class Families:
    """The families that were seen last, by outline."""

    def __init__(self) -> None:
        self._families: OrderedDict[tuple[int, int], list[Family]] = OrderedDict()

    def clear(self) -> None:
        """Forget all of them."""
        self._families.clear()

    def find(self, outline: C.Outline) -> Family | None:
        """The family of an outline, which may be a new one; None if it cannot have any."""
        if not outline.comes_again:
            return None
        key = outline.key
        bucket = self._families.setdefault(key, [])
        self._families.move_to_end(key)
        while len(self._families) > limits.MAX_FAMILIES:
            self._families.popitem(last=False)
        for family in bucket:
            if family.outline.same(outline):
                return family
        bucket.append(Family(outline))
        return bucket[-1]


def _origin(raw: RawGraph, ranks: Sequence[int], position: int) -> str:
    """Where an integer of a step comes from, in words, with the line that uses it first."""
    start = 0
    for index, rank in enumerate(ranks):
        if start <= position < start + rank:
            dtype, sizes, *_ = raw["inputs"][index]
            shape = ", ".join(map(str, sizes))
            return f"dimension {position - start} of an input {str(dtype)[6:]}[{shape}]{_first_use(raw, index)}"
        start += 2 * rank + 1
    return "an integer argument"


def _first_use(raw: RawGraph, input_: int) -> str:
    def reads(arg: Any) -> bool:
        if arg[0] == "list":
            return any(reads(item) for item in arg[1])
        return bool(arg[0] == "edge" and arg[1] == input_)

    for node in raw["nodes"]:
        if node["file"] and any(reads(arg) for arg in node["args"]):
            return f" (used at {node['file']}:{node['line']})"
    return ""
