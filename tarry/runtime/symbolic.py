"""The program of a family of steps (see `varying`): from a template to a graph whose sizes vary, compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tarry.backends.base import Backend, Batch, PythonNumber, Step
from tarry.errors import IRError, Unsupported
from tarry.ir.build import from_raw
from tarry.ir.sizes import Symbols
from tarry.passes.generalize import generalize
from tarry.passes.pipeline import run
from tarry.runtime.program import CompiledProgram
from tarry.runtime.steps import CompiledStep, InterpretedStep, Recompile, Variant, unsupported_message
from tarry.runtime.varying import Family, Template, exemplary

EXEMPLARS = 4
"""How often a step goes through the passes at different sizes. Two determine most polynomials; the others check."""

MAX_RANGES = 3
"""Programs of one family for different ranges of sizes. After that many, sizes outside them are compiled one by one."""


class SymbolicStep(CompiledStep):
    """The programs of a family. They differ in the numbers that are constants to them."""

    def __init__(
        self,
        backend: Backend,
        batch: Batch,
        family: Family,
        symbols: Symbols,
        recompile: Recompile,
        guard: Callable[[], object],
    ) -> None:
        assert family.template is not None
        self._template: Template = family.template
        self._exemplars = exemplary(self._template, symbols, EXEMPLARS)
        try:
            self._graphs = [
                run(from_raw(batch.raw(self._template.integers(each))), backend.stage) for each in self._exemplars
            ]
        except Exception as error:  # the template was a wrong guess: there is no such step at other sizes
            raise Unsupported(None, f"there is no such step at other sizes: {error}") from error
        columns = zip(*(graph.numbers for graph in self._graphs), strict=True)
        self._sized = {column[0].index for column in columns if any(n.value != column[0].value for n in column)}
        self._set_up(backend, self._graphs[0], recompile, guard)
        self._varied |= family.varied_numbers()
        self._compile(batch.numbers())

    def run_at(self, batch: Batch, symbols: Symbols) -> bool:
        """Compute a batch, given the values of the symbols. False: the program is not right for those values."""
        numbers = batch.numbers()
        found = next((program for guard, program in self._variants if guard.accepts(numbers)), None)
        program = self._another(batch, numbers) if found is None else found
        if isinstance(program, CompiledProgram) and not program.accepts(symbols):
            return False
        program.run(batch, [*numbers, *symbols])
        return True

    def _compile(self, numbers: Sequence[PythonNumber]) -> Variant:
        refusals = self._refusals()
        fixed = {index: numbers[index] for index in refusals if index not in self._sized}
        try:
            ready = [
                self._ready(graph, fixed | {k: graph.numbers[k].value for k in refusals if k in self._sized})
                for graph in self._graphs
            ]
            graph = generalize(ready, self._exemplars, self._template.polynomials)
        except IRError as error:
            raise Unsupported(None, str(error)) from error
        program: CompiledProgram | InterpretedStep
        try:
            program = CompiledProgram(self._backend, graph, self._guard, symbols=self._exemplars[0])
        except Unsupported as error:
            if not self._variants:
                raise
            program = InterpretedStep(unsupported_message(self._backend, error))
        return self._keep(fixed, {index: refusals[index] for index in fixed}, program)


class FamilyStep:
    """What computes a family's steps: the reference path for a while (see `patience`), then a program with symbolic
    sizes, made by `make`; and `otherwise` where there is none that is right. A compiler decides by the sizes at hand
    how it goes about a step (up to 4096 elements so, above otherwise), so there may be a few for different ranges."""

    def __init__(
        self,
        family: Family,
        make: Callable[[Batch, Symbols], SymbolicStep | None],
        otherwise: Callable[[Batch], Step],
        runs: int,
    ) -> None:
        self._family = family
        self._make = make
        self._otherwise = otherwise
        self._runs = runs
        self._attempts = 0
        self._steps: list[SymbolicStep] = []

    def __call__(self, batch: Batch, symbols: Symbols) -> None:
        if self._runs > 0:
            self._runs -= 1
            batch.interpret(interruptible=False)
            return
        if any(step.run_at(batch, symbols) for step in self._steps):
            return
        if self._attempts < MAX_RANGES:
            self._attempts += 1
            step = self._make(batch, symbols)
            if step is not None:
                self._steps.append(step)
                if step.run_at(batch, symbols):
                    return
            elif not self._steps:
                self._family.give_up()
        self._otherwise(batch)(batch)
