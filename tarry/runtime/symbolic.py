"""The program of a family of steps (see `varying`): from a template to a graph whose sizes vary, compiled once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tarry.backends.base import Backend, Batch, PythonNumber
from tarry.errors import IRError, Unsupported
from tarry.ir.build import from_raw
from tarry.ir.graph import Graph
from tarry.ir.raw import RawGraph
from tarry.ir.sizes import Symbols
from tarry.passes.generalize import generalize
from tarry.passes.pipeline import run
from tarry.runtime.background import breathe
from tarry.runtime.computations import Sizes
from tarry.runtime.program import CompiledProgram
from tarry.runtime.steps import Another, CompiledStep, InterpretedStep, Make, Recording, Variant, unsupported_message
from tarry.runtime.varying import Family, exemplary

EXEMPLARS = 4
"""How often a step goes through the passes at different sizes. Two determine most polynomials; the others check."""


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """A block in which many objects are made that will be needed: the collector of garbage would look at all of them,
    and at all that there is besides, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class SizedRecording(Recording):
    """What compiling for all sizes needs of a batch: how it would have been recorded at some of them."""

    def __init__(self, batch: Batch, family: Family, symbols: Symbols) -> None:
        super().__init__(batch)
        assert family.template is not None
        self.template = family.template
        self.outline: tuple[int, int] = family.outline.key
        self.varied_numbers = frozenset(family.varied_numbers())
        self.why = family.describe(self._raw, symbols)
        self.symbols = symbols
        self.exemplars = exemplary(self.template, symbols, EXEMPLARS)
        with collecting_nothing():
            self.raws = [batch.raw(self.template.integers(each)) for each in self.exemplars]


class SymbolicStep(CompiledStep):
    """The programs of a family. They differ in the numbers that are constants to them."""

    def __init__(
        self, backend: Backend, recording: SizedRecording, make: Make, guard: Callable[[], object], another: Another
    ) -> None:
        self._template = recording.template
        self._exemplars = recording.exemplars
        self._sizes = Sizes(recording.exemplars[0], recording.symbols)
        try:
            self._graphs = [self._at(raw, backend.stage) for raw in recording.raws]
        except Exception as error:  # the template was a wrong guess: there is no such step at other sizes
            raise Unsupported(None, f"there is no such step at other sizes: {error}") from error
        columns = zip(*(graph.numbers for graph in self._graphs), strict=True)
        self._sized = {column[0].index for column in columns if any(n.value != column[0].value for n in column)}
        self._set_up(backend, self._graphs[0], guard, another)
        self._varied |= recording.varied_numbers
        self.add(self.compile(recording.numbers, make))

    @staticmethod
    def _at(raw: RawGraph, stage: str) -> Graph:
        """The graph at the sizes of an exemplar."""
        graph = from_raw(raw)
        breathe()
        return run(graph, stage, between=breathe)

    def run_at(self, batch: Batch, symbols: Symbols) -> bool:
        """Compute a batch, given the values of the symbols. False: the program is not right for those values."""
        numbers = batch.numbers()
        found = self.find(numbers)
        program = self._ask_for_another(self, batch, numbers) if found is None else found
        if not isinstance(program, CompiledProgram):
            program.run(batch, numbers)
        elif not program.accepts(symbols):
            return False
        elif program.is_native:
            program.run_native(batch, symbols)
        else:
            program.run(batch, [*numbers, *symbols])
        return True

    def compile(self, numbers: Sequence[PythonNumber], make: Make) -> Variant:
        """As for fixed sizes."""
        backend = self._backend
        refusals = self._refusals()
        fixed = {index: numbers[index] for index in refusals if index not in self._sized}
        try:
            ready = [
                self._ready(graph, fixed | {k: graph.numbers[k].value for k in refusals if k in self._sized})
                for graph in self._graphs
            ]
            graph = generalize(ready, self._exemplars, self._template.polynomials)
            breathe()
        except IRError as error:
            raise Unsupported(None, str(error)) from error
        program: CompiledProgram | InterpretedStep
        try:
            program = self._program(graph, make)
        except Unsupported as error:
            if not self._variants:
                raise
            program = InterpretedStep(unsupported_message(backend, error))
        return self._guarded(fixed, {index: refusals[index] for index in fixed}, program)

    def _program(self, graph: Graph, make: Make) -> CompiledProgram:
        backend = self._backend
        unknown = next((node for node in graph.nodes if not backend.supports(node)), None)
        if unknown is not None:
            raise Unsupported(unknown, "a step with symbolic sizes is compiled as a whole or not at all")
        return CompiledProgram(backend, graph, lambda whole: make(whole, self._sizes), self._guard)
