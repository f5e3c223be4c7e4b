"""Sizes that Inductor does not know while it compiles: torch's symbolic integers, and what it assumes of them.

A compiler that meets a comparison of sizes decides it by the sizes at hand, and notes a guard. A program may be used
for other sizes only if all its guards hold there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from tarry.backends.fx.symbolic import SymbolicFxProgram, sized
from tarry.backends.inductor.guards import Guards
from tarry.errors import Unsupported
from tarry.ir.sizes import Symbols

# How symbolic integers are made, where guards are kept and how they are printed is not public: checked on torch 2.11
# and 2.13.


class SymbolicSizes:
    """Symbolic integers for some symbols, which a compiler takes for integers above 1."""

    def __init__(self, hints: Symbols) -> None:
        # Importing it takes a second: not in a process whose programs are all made by another one, or stored.
        from torch._dynamo.source import ConstantSource

        self.environment = ShapeEnv(duck_shape=False)
        self._hints = hints
        self.symbols: list[Any] = []
        self._names: list[sympy.Symbol] = []
        for k, hint in enumerate(hints):
            source = ConstantSource(f"size_{k}")
            name = self.environment.create_symbol(hint, source, DimDynamic.DYNAMIC, constraint_dim=None)
            self._names.append(name)
            self.symbols.append(self.environment.create_symintnode(name, hint=hint, source=source))

    def guards(self) -> Guards:
        """What was assumed. Raises Unsupported if a symbol was given a value for good, or if it cannot be written down:
        what cannot be checked must not be used."""
        for k, name in enumerate(self._names):
            if self.environment.replace(name).is_number:
                raise Unsupported(None, f"Inductor compiles symbol s{k} for one value only")
        noted = dict.fromkeys(guard.expr for guard in self.environment.guards)
        expressions = [expression for expression in noted if not self._surely(expression)]
        names = {name: sympy.Symbol(f"s{k}", integer=True) for k, name in enumerate(self._names)}
        printer = PythonPrinter()
        guards = Guards([printer.doprint(each.xreplace(names)) for each in expressions], len(names))
        try:
            agrees = guards(self._hints)  # they were noted because they hold there
        except Exception as error:
            raise Unsupported(None, f"what Inductor assumes of the sizes cannot be written down: {error}") from error
        if not agrees:
            raise Unsupported(None, "what Inductor assumes of the sizes is not what it was compiled with")
        return guards

    def _surely(self, expression: Any) -> bool:
        """Whether a guard holds for all integers above 1 by its form: a comparison of a polynomial without negative
        factors, in which symbols are replaced by what is above 1."""
        above = {name: sympy.Symbol(f"n{k}", integer=True, nonnegative=True) + 2 for k, name in enumerate(self._names)}
        try:
            return sympy.simplify(sympy.expand(expression.xreplace(above))) == sympy.true
        except Exception:  # some function of torch's that sympy cannot expand: it is checked at each use
            return False


def check_results(program: SymbolicFxProgram, results: Sequence[torch.Tensor], symbols: Sequence[Any]) -> None:
    """Refuse a trace whose results have other sizes than the graph says, at some values of the symbols."""
    returned = [value for k, value in enumerate(program.graph.outputs) if k not in program.in_place]
    for value, result in zip(returned, results, strict=True):
        expected, _ = sized(value.type, symbols)
        for found, wanted in zip(result.shape, expected, strict=True):
            if sympy.expand(_expression(found) - _expression(wanted)) != 0:
                raise Unsupported(None, f"a result has size {found} where {wanted} was expected")


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
