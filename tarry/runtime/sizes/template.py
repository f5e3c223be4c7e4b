"""Templates: how the integers of graphs that differ in sizes only depend on each other, guessed from examples.

A template is a guess. Each batch is compared with it, integer by integer, before a program for several sizes computes
the batch: one that does not fit is a new example, and perhaps makes a better template.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tarry.ir.sizes import Polynomial, Symbols, fit
from tarry.native import C
from tarry.runtime import limits


@dataclass(frozen=True)
class Template:
    """How the integers of a family depend on each other. `symbols`: the position of each symbol among the integers;
    `indices`: for each integer, its polynomial."""

    symbols: tuple[int, ...]
    polynomials: tuple[Polynomial, ...]
    indices: tuple[int, ...]
    matcher: C.SizeTemplate = field(repr=False, compare=False)

    def match(self, outline: C.Outline) -> Symbols | None:
        """The values of the symbols, if a step is a case of this template."""
        found = self.matcher.match(outline)
        return None if found is None else tuple(found)

    def integers(self, symbols: Symbols) -> list[int]:
        """The integers of the step at some values of the symbols."""
        values = [polynomial.at(symbols) for polynomial in self.polynomials]
        return [values[index] for index in self.indices]

    def constants(self) -> set[int]:
        """The integers that do not vary."""
        return {polynomial.at(()) for polynomial in self.polynomials if polynomial.is_constant}


# ---- templates from examples


def find_template(examples: Sequence[Sequence[int]], ranks: Sequence[int]) -> Template | None:
    """A template that all examples are cases of; None if there is none, or none that varies."""
    columns = list(zip(*examples, strict=True))
    first: dict[tuple[int, ...], int] = {}  # each column once, with the position where it stands first
    for position, column in enumerate(columns):
        first.setdefault(column, position)
    varying = sorted((column for column in first if len(set(column)) > 1), key=max)
    if not varying:
        return None
    of_inputs = [columns[position] for position in _input_sizes(ranks)]
    symbols: list[tuple[int, ...]] = []
    while True:
        fitted = _fit_all(varying, symbols)
        missing = [column for column in varying if column not in fitted]
        if not missing:
            break
        wanted = set(missing)
        chosen = next((column for column in of_inputs if column in wanted), missing[0])
        _adopt(symbols, chosen)
        if len(symbols) > limits.MAX_SYMBOLS or min(chosen) < 2:
            return None
    polynomials: dict[Polynomial, int] = {}
    numbers: dict[tuple[int, ...], int] = {}
    for column in first:
        polynomial = fitted.get(column) or Polynomial.constant(column[0])
        numbers[column] = polynomials.setdefault(polynomial, len(polynomials))
    indices = [numbers[column] for column in columns]
    where = [first[symbol] for symbol in symbols]
    matcher = C.SizeTemplate(where, [[(f, list(p)) for f, p in each.terms] for each in polynomials], indices)
    return Template(tuple(where), tuple(polynomials), tuple(indices), matcher)


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
    """Make a column a symbol: instead of one that is a multiple of it (the size before pooling), or besides."""
    for k, symbol in enumerate(symbols):
        if fit(symbol, [(value,) for value in column]) is not None:
            symbols[k] = column
            return
    symbols.append(column)


def _input_sizes(ranks: Sequence[int]) -> Iterator[int]:
    """The positions of the inputs' sizes among the integers."""
    start = 0
    for rank in ranks:
        yield from range(start, start + rank)
        start += 2 * rank + 1


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
