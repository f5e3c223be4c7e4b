"""The lowering of a graph whose sizes vary: the symbols are integer inputs, and sizes are computed from them."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tarry.backends.fx.lower import FxLowering, FxProgram
from tarry.ir.graph import Graph, Node
from tarry.ir.layout import TensorType
from tarry.ir.sizes import Polynomial, Size
from tarry.passes.foreach import unroll_foreach


@dataclass
class SymbolicFxProgram(FxProgram):
    """An FX graph whose first inputs are the symbols, then those of any FxProgram."""

    symbols: int

    def symbolic_inputs(self, symbols: Sequence[Any]) -> list[Any]:
        """The inputs for a trace, given what stands for the symbols (integers, or such as only a compiler knows)."""
        made: list[Any] = list(symbols)
        for value in self.graph.inputs:
            sizes, strides = sized(value.type, symbols)
            made.append(torch.empty_strided(sizes, strides, dtype=value.type.dtype, device=self.device))
        made.extend(torch.empty(len(v.indices), dtype=v.dtype, device=v.device) for v in self.vectors)
        return made


def sized(type_: TensorType, symbols: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The sizes and strides of a type at the symbols' values, which may be symbolic integers."""

    def value(n: int) -> Any:
        return n.polynomial.at(symbols) if isinstance(n, Size) else n

    return [value(n) for n in type_.sizes], [value(n) for n in type_.strides]


def lower_symbolic(graph: Graph, device: str | torch.device, symbols: int) -> SymbolicFxProgram:
    """As `lower`, for a graph with that many symbols."""
    context = _SymbolicLowering(unroll_foreach(graph), torch.device(device))
    context.symbols = [context.fx.placeholder(f"size_{k}") for k in range(symbols)]
    context.lower()
    made = context.finish(in_place=True)
    return SymbolicFxProgram(made.graph, made.device, made.vectors, made.in_place, made.module, symbols)


class _SymbolicLowering(FxLowering):
    """Wherever a size is handed to an operator, what computes it is handed over."""

    symbols: list[torch.fx.Node]

    def lower(self, nodes: Iterable[Node] | None = None) -> _SymbolicLowering:
        self._computed: dict[Polynomial, torch.fx.Node] = {}
        super().lower(nodes)
        return self

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.fx.Node:
        given = [self._sized(arg) for arg in args]
        named = {name: self._sized(arg) for name, arg in kwargs.items()}
        return super()._call(target, *given, **named)

    def _sized(self, arg: Any) -> Any:
        if isinstance(arg, Size):
            return self._compute(arg.polynomial)
        if isinstance(arg, list | tuple):
            return type(arg)([self._sized(item) for item in arg])
        return arg

    def _compute(self, polynomial: Polynomial) -> torch.fx.Node:
        if polynomial not in self._computed:
            total: Any = None
            for factor, product in polynomial.terms:
                term: Any = factor
                for symbol in product:
                    node = self.symbols[symbol]
                    term = node if term == 1 else self.fx.call_function(python_operator.mul, (term, node))
                total = term if total is None else self.fx.call_function(python_operator.add, (total, term))
            self._computed[polynomial] = total
        return self._computed[polynomial]
