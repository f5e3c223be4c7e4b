"""Steps that come again with other sizes: found by their outline, and taken by one program with symbolic sizes.

A *family* is all steps that differ in integers only (sizes, strides, offsets, integer arguments: csrc/outline.h). Two
members of a family, or a few, make a *template*: which integers vary, and how they hang together. It is a guess from
examples, and each step is checked against it before the family's program computes it: where it does not fit, there is
a new example, and perhaps a better template.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tarry.backends.base import Batch, PythonNumber, Step
from tarry.ir.raw import RawGraph
from tarry.ir.sizes import Polynomial, Symbols, fit
from tarry.native import C
from tarry.runtime.steps import Recording, ReferenceStep

log = logging.getLogger("tarry")

MAX_SYMBOLS = 4
MAX_ATTEMPTS = 12
"""How often a template is looked for in one family. After that, its sizes vary by no rule."""
MAX_FAILURES = 2
"""A first template may fail because it was a wrong guess; if another does, it is not for that."""
MAX_EXAMPLES = 4
MAX_FAMILIES = 512
MAX_STATIC = 8
"""Programs for fixed sizes that are compiled for one family. After that many, the reference path takes other sizes."""


class SizedStep(Protocol):
    """Computes the batches of a family, given the values of its symbols."""

    @property
    def ready(self) -> bool: ...
    def run_at(self, batch: Batch, symbols: Symbols) -> None: ...


@dataclass(frozen=True)
class AnySizes:
    """A step that takes any sizes as it is."""

    step: Step
    ready: bool = True

    def run_at(self, batch: Batch, symbols: Symbols) -> None:
        self.step(batch)


class StepAt:
    """A family's step at some values of its symbols."""

    __slots__ = ("step", "symbols")

    def __init__(self, step: SizedStep, symbols: Symbols) -> None:
        self.step = step
        self.symbols = symbols

    @property
    def ready(self) -> bool:
        """Whether there is a program."""
        return self.step.ready

    def __call__(self, batch: Batch) -> None:
        self.step.run_at(batch, self.symbols)


@dataclass(frozen=True)
class Template:
    """How the integers of a family hang together. `symbols`: the place of each symbol among the integers."""

    symbols: tuple[int, ...]
    polynomials: tuple[Polynomial, ...]
    places: tuple[int, ...]
    native: Any = field(repr=False, compare=False)

    def match(self, outline: Any) -> Symbols | None:
        """The values of the symbols, if a step is a case of this template."""
        found = self.native.match(outline)
        return None if found is None else tuple(found)

    def integers(self, symbols: Symbols) -> list[int]:
        """The integers of the step at some values of the symbols."""
        values = [polynomial.at(symbols) for polynomial in self.polynomials]
        return [values[place] for place in self.places]

    def constants(self) -> set[int]:
        """The integers that do not vary."""
        return {polynomial.at(()) for polynomial in self.polynomials if polynomial.is_constant}


@dataclass
class Example:
    """A member of a family as it was recorded once."""

    integers: list[int]
    numbers: list[PythonNumber]


@dataclass
class Family:
    """Steps that differ in integers only, with what is known of them so far."""

    outline: Any
    examples: list[Example] = field(default_factory=list)
    template: Template | None = None
    fitted: list[Example] = field(default_factory=list)  # what the template was made from
    step: SizedStep | None = None
    seconds: float = 0.0  # on the reference path, while its step waits for a program
    attempts: int = 0  # to find a template
    failures: int = 0  # templates that the backend made no program of
    static: int = 0  # programs compiled for fixed sizes
    said: bool = False  # that there are enough of those

    @property
    def may_vary(self) -> bool:
        """Whether a template may still be found."""
        return self.attempts < MAX_ATTEMPTS and self.failures < MAX_FAILURES

    def vary(self, example: Example) -> bool:
        """A member that the template, if there is one, does not fit: whether there is a better one now."""
        if not self.may_vary:
            return False
        self.attempts += 1
        earlier = [self.fitted, *([known] for known in reversed(self.examples))]
        self.examples = [*self.examples[1 - MAX_EXAMPLES :], example]
        for examples in earlier:
            found = find_template([e.integers for e in (*examples, example)], self.outline.ranks) if examples else None
            if found is not None:
                self.template, self.fitted, self.step = found, [*examples, example], None
                return True
        return False

    def settle(self, batch: Batch) -> Symbols | None:
        """The values of the symbols for a member, for which a template is looked for only now; None if it fits none."""
        outline = batch.outline()
        if self.template is None:
            step = self.step
            found = self.vary(Example(outline.integers, list(batch.numbers())))
            self.step = step if found else None
        return None if self.template is None else self.template.match(outline)

    def give_up(self) -> None:
        """The backend makes no program of the template."""
        self.template, self.step, self.fitted = None, None, []
        self.failures += 1

    def crowded(self, batch: Batch) -> Step | None:
        """The reference path, if programs were compiled for enough sizes. Says so once."""
        if self.static < MAX_STATIC:
            return None
        what = f"{Recording(batch).describe()} was compiled for {MAX_STATIC} different sizes"
        if not self.said:
            self.said = True
            log.warning("tarry: %s; others run on the reference path", what)
        return ReferenceStep(what)

    def count(self) -> None:
        """A program was compiled for fixed sizes."""
        self.static += 1

    def varied_numbers(self) -> set[int]:
        """The numbers that were not the same in all examples."""
        columns = zip(*(example.numbers for example in self.fitted), strict=True)
        return {index for index, column in enumerate(columns) if any(repr(n) != repr(column[0]) for n in column)}

    def describe(self, raw: RawGraph, symbols: Symbols) -> str:
        """What varies, for a line of the log: each symbol by where it comes from, what it was and what it is."""
        assert self.template is not None
        parts = []
        for place, now in zip(self.template.symbols, symbols, strict=True):
            seen = [example.integers[place] for example in reversed(self.fitted)]
            before = next((value for value in seen if value != now), now)
            parts.append(f"{_whereabouts(raw, self.outline.ranks, place)} was {before} and is {now} now")
        return "; ".join(parts)


class Families:
    """The families that were seen last, by outline."""

    def __init__(self) -> None:
        self._families: OrderedDict[tuple[int, int], list[Family]] = OrderedDict()
        self._family: Family | None = None

    def clear(self) -> None:
        """Forget all of them."""
        self._families.clear()
        self._family = None

    def find(self, batch: Batch) -> Step | None:
        """The step of a batch's family, if there is one and it is right for the batch's sizes. Without a template, it
        takes all sizes, or decides when it is time to look for one."""
        self._family = None
        outline = batch.outline()
        if not outline.comes_again:
            return None
        self._family = family = self._family_of(outline)
        self._outline = outline
        if family.step is None:
            return None
        if family.template is None:
            return StepAt(family.step, ())
        symbols = family.template.match(outline)
        if symbols is None:
            return None
        return StepAt(family.step, symbols)

    @property
    def family(self) -> Family | None:
        """The family of the batch that was looked for last, if it can have one."""
        return self._family

    def note(self, batch: Batch) -> bool:
        """Whether that batch has given its family a new template."""
        assert self._family is not None
        return self._family.vary(Example(self._outline.integers, list(batch.numbers())))

    def _family_of(self, outline: Any) -> Family:
        key = outline.key
        bucket = self._families.get(key)
        if bucket is None:
            bucket = self._families[key] = []
            while len(self._families) > MAX_FAMILIES:
                self._families.popitem(last=False)
        else:
            self._families.move_to_end(key)
        for family in bucket:
            if family.outline.same(outline):
                return family
        bucket.append(Family(outline))
        return bucket[-1]


# ---- templates from examples


def find_template(examples: Sequence[Sequence[int]], ranks: Sequence[int]) -> Template | None:
    """A template that all examples are cases of; None if there is none, or none that varies."""
    columns = list(zip(*examples, strict=True))
    first: dict[tuple[int, ...], int] = {}  # each column once, by the place where it stands first
    for place, column in enumerate(columns):
        first.setdefault(column, place)
    varying = sorted((column for column in first if len(set(column)) > 1), key=max)
    if not varying:
        return None
    of_inputs = [columns[place] for place in _input_sizes(ranks)]
    symbols: list[tuple[int, ...]] = []
    while True:
        fitted = _fit_all(varying, symbols)
        missing = [column for column in varying if column not in fitted]
        if not missing:
            break
        wanted = set(missing)
        chosen = next((column for column in of_inputs if column in wanted), missing[0])
        _adopt(symbols, chosen)
        if len(symbols) > MAX_SYMBOLS or min(chosen) < 2:
            return None
    polynomials: dict[Polynomial, int] = {}
    numbers: dict[tuple[int, ...], int] = {}
    for column in first:
        polynomial = fitted.get(column) or Polynomial.constant(column[0])
        numbers[column] = polynomials.setdefault(polynomial, len(polynomials))
    places = [numbers[column] for column in columns]
    where = [first[symbol] for symbol in symbols]
    native = C.SizeTemplate(where, [[(f, list(p)) for f, p in each.terms] for each in polynomials], places)
    return Template(tuple(where), tuple(polynomials), tuple(places), native)


def _fit_all(columns: Sequence[tuple[int, ...]], symbols: list[tuple[int, ...]]) -> dict[tuple[int, ...], Polynomial]:
    found: dict[tuple[int, ...], Polynomial] = {}
    if not symbols:
        return found
    examples = list(zip(*symbols, strict=True))
    known: list[Polynomial] = []
    for column in columns:
        if column in symbols:
            found[column] = Polynomial.symbol(symbols.index(column))
        elif polynomial := fit(column, examples, known):
            found[column] = polynomial
            known.append(polynomial)
    return found


def _adopt(symbols: list[tuple[int, ...]], column: tuple[int, ...]) -> None:
    """Make a column a symbol: in the place of one that is a multiple of it (the size before pooling), or besides."""
    for k, symbol in enumerate(symbols):
        if fit(symbol, [(value,) for value in column]) is not None:
            symbols[k] = column
            return
    symbols.append(column)


def _input_sizes(ranks: Sequence[int]) -> Iterator[int]:
    """Where the sizes of the inputs stand among the integers."""
    place = 0
    for rank in ranks:
        yield from range(place, place + rank)
        place += 2 * rank + 1


# ---- sizes to compile for


def exemplary(template: Template, symbols: Symbols, count: int) -> list[Symbols]:
    """Values of the symbols that have nothing in common with each other, with `symbols` or with constants of the step:
    a pass or a compiler that sees two equal sizes may take them for the same. The first are close to `symbols`."""
    taken = template.constants() | set(symbols)
    made: list[Symbols] = []
    for _ in range(count):
        values = []
        for symbol in symbols:
            candidate = max(symbol, 10)
            while candidate in taken or not _is_prime(candidate):
                candidate += 1
            taken.add(candidate)
            values.append(candidate)
        made.append(tuple(values))
    return made


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


# ---- for people


def _whereabouts(raw: RawGraph, ranks: Sequence[int], place: int) -> str:
    """Where an integer of a step comes from, in words, with the line that uses it first."""
    start = 0
    for position, rank in enumerate(ranks):
        if start <= place < start + rank:
            dtype, sizes, *_ = raw["inputs"][position]
            shape = ", ".join(map(str, sizes))
            return f"dimension {place - start} of an input {str(dtype)[6:]}[{shape}]{_line(raw, position)}"
        start += 2 * rank + 1
    return "an integer argument"


def _line(raw: RawGraph, input_: int) -> str:
    def reads(arg: Any) -> bool:
        if arg[0] == "list":
            return any(reads(item) for item in arg[1])
        return bool(arg[0] == "edge" and arg[1] == input_)

    for node in raw["nodes"]:
        if node["file"] and any(reads(arg) for arg in node["args"]):
            return f" (used at {node['file']}:{node['line']})"
    return ""
