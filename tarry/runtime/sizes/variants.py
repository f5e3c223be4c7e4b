"""The programs of a family (`families.py`): from a template to a graph whose sizes vary, compiled once."""

from __future__ import annotations

from collections.abc import Mapping

from tarry.backends.base import Backend, PythonNumber
from tarry.backends.partition import compiles
from tarry.errors import IRError, Unsupported
from tarry.ir.build import from_raw
from tarry.ir.graph import Graph
from tarry.ir.raw import RawGraph
from tarry.passes.generalize import generalize
from tarry.passes.pipeline import run
from tarry.runtime.compile.computations import Build, Sizes
from tarry.runtime.compile.jobs import yield_to_user
from tarry.runtime.program import Program
from tarry.runtime.sizes.families import SizedRecording
from tarry.runtime.variants import Variants


class SizedVariants(Variants):
    """The programs of a range of sizes. They differ in the numbers that are constants to them."""

    def __init__(self, backend: Backend, recording: SizedRecording, build: Build) -> None:
        self._template = recording.template
        self._exemplars = recording.exemplars
        self._sizes = Sizes(recording.exemplars[0], recording.symbols)
        try:
            self._graphs = [self._at(raw, backend.stage) for raw in recording.raws]
        except Exception as error:  # the template was a wrong guess: there is no such step at other sizes
            raise Unsupported(None, f"there is no such step at other sizes: {error}") from error
        self._set_up(backend, self._graphs[0])
        columns = zip(*(graph.numbers for graph in self._graphs), strict=True)
        self._sized = frozenset(column[0].index for column in columns if len({n.value for n in column}) > 1)
        self._varied = recording.varied_numbers
        self.add(self.compile(recording.numbers, build))

    @staticmethod
    def _at(raw: RawGraph, stage: str) -> Graph:
        """The graph at the sizes of an exemplar."""
        graph = from_raw(raw)
        yield_to_user()
        return run(graph, stage, between=yield_to_user)

    def _program(self, constants: Mapping[int, PythonNumber], build: Build) -> Program:
        sized = [index for index in self._refusals() if index in self._sized]
        try:
            ready = [
                self._ready(graph, {**constants, **{index: graph.numbers[index].value for index in sized}})
                for graph in self._graphs
            ]
            graph = generalize(ready, self._exemplars, self._template.polynomials)
            build.keep("lowered", graph)
        except IRError as error:
            raise Unsupported(None, str(error)) from error
        yield_to_user()
        unknown = next((node for node in graph.nodes if not compiles(self._backend, node)), None)
        if unknown is not None:
            raise Unsupported(unknown, "a step with symbolic sizes is compiled as a whole or not at all")
        return Program(self._backend, graph, build, sizes=self._sizes)
