"""Sizes that vary: integers of a graph as polynomials of a few symbols, found from examples.

A step that is recorded with batches of 8 and of 6 gives two graphs that differ in integers only: 8 and 6, 64 and 48
(a stride), 9 and 7 (something concatenated). `fit` finds out that these are s, 8*s and s + 1. A graph whose integers
are given so stands for both steps, and for those of other sizes: in such a graph the integers are `Size`s.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tarry.ir.graph import Graph, Value, map_leaves
from tarry.ir.layout import TensorType

Symbols: TypeAlias = tuple[int, ...]
"""A value for each symbol."""

MAX_DEGREE = 3


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of products: each term is a factor and the symbols (by number) that it is multiplied with."""

    terms: tuple[tuple[int, tuple[int, ...]], ...]

    @staticmethod
    def constant(value: int) -> Polynomial:
        return Polynomial(((value, ()),))

    @staticmethod
    def symbol(number: int) -> Polynomial:
        return Polynomial(((1, (number,)),))

    def at(self, symbols: Sequence[int]) -> int:
        return sum(factor * math.prod(symbols[s] for s in product) for factor, product in self.terms)

    @property
    def is_constant(self) -> bool:
        return all(not product for _, product in self.terms)

    def __add__(self, other: Polynomial) -> Polynomial:
        return _sum((*self.terms, *other.terms))

    def __mul__(self, other: Polynomial) -> Polynomial:
        return _sum((a * b, tuple(sorted((*x, *y)))) for a, x in self.terms for b, y in other.terms)

    @staticmethod
    def parse(text: str) -> Polynomial:
        """The polynomial that is written so: the inverse of `str`."""
        terms = []
        for sign, factor, product in _TERM.findall(f"+ {text}"):
            value = int(factor.removesuffix("*") or 1)
            symbols = tuple(int(name[1:]) for name in product.split("*") if name)
            terms.append((-value if sign == "-" else value, symbols))
        parsed = Polynomial(tuple(terms))
        if str(parsed) != text:
            raise ValueError(f"{text!r} is no sum of products")
        return parsed

    def __str__(self) -> str:
        parts = []
        for factor, product in self.terms:
            names = [f"s{symbol}" for symbol in product]
            parts.append("*".join(names if factor == 1 and names else [str(factor), *names]))
        return " + ".join(parts).replace("+ -", "- ") or "0"


_TERM = re.compile(r"([+-]) ?(-?\d+(?:\*|(?![\d*]))|)((?:s\d+\*?)*)")


def _sum(terms: Iterator[tuple[int, tuple[int, ...]]] | Sequence[tuple[int, tuple[int, ...]]]) -> Polynomial:
    total: dict[tuple[int, ...], int] = {}
    for factor, product in terms:
        total[product] = total.get(product, 0) + factor
    return Polynomial(tuple((factor, product) for product, factor in total.items() if factor))


class Size(int):
    """An integer of a graph that stands for all values of a polynomial. As an int it is the value in the graph at
    hand, so that whatever only looks at the graph need not know."""

    polynomial: Polynomial

    def __new__(cls, value: int, polynomial: Polynomial) -> Size:
        made = super().__new__(cls, value)
        made.polynomial = polynomial
        return made


def at(graph: Graph, symbols: Sequence[int]) -> Graph:
    """The graph at some values of its symbols: the same with plain integers."""
    return _with_sizes(graph, lambda size: size.polynomial.at(symbols))


def without_values(graph: Graph) -> Graph:
    """The graph for all sizes, without a trace of those that it was made at."""
    return _with_sizes(graph, lambda size: Size(0, size.polynomial))


def _with_sizes(graph: Graph, change: Callable[[Size], int]) -> Graph:
    def integer(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, Size) else leaf

    values: dict[int, Value] = {}

    def define(value: Value) -> None:
        sizes, strides = (map_leaves(part, integer) for part in (value.type.sizes, value.type.strides))
        values[value.id] = Value(value.id, TensorType(value.type.dtype, sizes, strides))

    def argument(leaf: Any) -> Any:
        return values[leaf.id] if isinstance(leaf, Value) else integer(leaf)

    for value in graph.inputs:
        define(value)
    nodes = []
    for node in graph.nodes:
        args = map_leaves(node.args, argument)
        for value in node.results:
            define(value)
        outputs = tuple(None if value is None else values[value.id] for value in node.outputs)
        nodes.append(replace(node, args=args, outputs=outputs))
    return replace(
        graph,
        inputs=tuple(values[value.id] for value in graph.inputs),
        nodes=tuple(nodes),
        outputs=tuple(values[value.id] for value in graph.outputs),
    )


# ---- from examples to polynomials


def fit(values: Sequence[int], examples: Sequence[Symbols], known: Sequence[Polynomial] = ()) -> Polynomial | None:
    """The simplest polynomial that has these values in these examples; None if none is found.

    A few examples fit many polynomials, so the order of the attempts matters: what sizes and strides are made of comes
    first. `known` are such that occur elsewhere: a stride is a product of sizes. The result is a guess that has to be
    checked where it is used.
    """
    if all(value == values[0] for value in values):
        return Polynomial.constant(values[0])
    count = len(examples[0])
    bases = [Polynomial(((1, product),)) for product in _products(count)]
    sums = [Polynomial(((1, (a,)), (1, (b,)))) for a, b in itertools.combinations(range(count), 2)]
    for base in bases:
        if found := _multiple(values, base, examples):
            return found
    for base in (*bases[:count], *sums):
        if found := _shifted(values, base, examples):
            return found
    several = [polynomial for polynomial in dict.fromkeys(known) if len(polynomial.terms) > 1]
    for base in (*several, *_pairs(several, bases[:count])):
        if found := _multiple(values, base, examples) or _shifted(values, base, examples):
            return found
    for base in bases:
        if found := _affine(values, base, examples):
            return found
    return None


def _products(count: int) -> list[tuple[int, ...]]:
    """Products of symbols, the shorter ones first."""
    return [
        product
        for degree in range(1, MAX_DEGREE + 1)
        for product in itertools.combinations_with_replacement(range(count), degree)
    ]


def _pairs(several: list[Polynomial], single: list[Polynomial]) -> Iterator[Polynomial]:
    for a, b in itertools.combinations_with_replacement(several[:8], 2):
        yield a * b
    for a in several[:8]:
        for b in single:
            yield a * b


def _multiple(values: Sequence[int], base: Polynomial, examples: Sequence[Symbols]) -> Polynomial | None:
    units = [base.at(example) for example in examples]
    if any(unit == 0 or value % unit for value, unit in zip(values, units, strict=True)):
        return None
    factors = {value // unit for value, unit in zip(values, units, strict=True)}
    return base * Polynomial.constant(factors.pop()) if len(factors) == 1 else None


def _shifted(values: Sequence[int], base: Polynomial, examples: Sequence[Symbols]) -> Polynomial | None:
    shifts = {value - base.at(example) for value, example in zip(values, examples, strict=True)}
    return base + Polynomial.constant(shifts.pop()) if len(shifts) == 1 else None


def _affine(values: Sequence[int], base: Polynomial, examples: Sequence[Symbols]) -> Polynomial | None:
    units = [base.at(example) for example in examples]
    k = next((k for k, unit in enumerate(units) if unit != units[0]), None)
    if k is None or (values[k] - values[0]) % (units[k] - units[0]):
        return None
    slope = (values[k] - values[0]) // (units[k] - units[0])
    scaled = base * Polynomial.constant(slope)
    return _shifted(values, scaled, examples) if slope else None
