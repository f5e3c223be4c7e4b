"""The programs of one graph: which numbers are inputs and which constants, and what happens when a constant changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from tarry.backends.base import Backend, PythonNumber, Recording
from tarry.backends.partition import compiles
from tarry.errors import Unsupported
from tarry.ir.graph import Graph, Node, Number, leaves, typed
from tarry.ir.sizes import Symbols
from tarry.native import C
from tarry.passes.decompose import decompose, is_decomposed, lower, named
from tarry.passes.donation import safe_updates
from tarry.passes.lowerings import lowerings_for
from tarry.passes.pipeline import run
from tarry.passes.specialize import specialize
from tarry.passes.split import split
from tarry.runtime import limits
from tarry.runtime.compile.computations import Build
from tarry.runtime.compile.jobs import yield_to_user
from tarry.runtime.entry import Entry, Reason, State
from tarry.runtime.program import Program


class Variant(NamedTuple):
    """A program with the numbers that are constants to it; a reason, if the backend cannot compile it for those."""

    guard: NumberGuard
    program: Program | Reason


class Variants:
    """The programs of one graph. They differ in the numbers that are constants to them."""

    def __init__(self, backend: Backend, recording: Recording, build: Build) -> None:
        graph = recording.recorded
        yield_to_user()
        self._set_up(backend, run(graph, backend.stage, between=yield_to_user, kept=build.stages))
        self._positions = recording.positions
        self.add(self.compile(recording.numbers, build))

    def _set_up(self, backend: Backend, graph: Graph) -> None:
        self._backend = backend
        self._graph = graph
        self._decompositions = named(backend.decompositions())
        self._lowerings = lowerings_for(backend.name)
        self._variants: list[Variant] = []
        self._varied: frozenset[int] = frozenset()
        self._sized: frozenset[int] = frozenset()  # numbers that follow from the sizes
        self._refused: tuple[frozenset[int], dict[int, Node]] | None = None
        self._entries: dict[Any, Entry[Variant]] = {}  # of constants that no program takes
        self.compiling: Entry[Variant] | None = None
        """The constants for which another program is being made. One at a time: it may take others as inputs."""
        self.unguarded: Program | None = None
        """A native program that takes any numbers, and reads them itself."""

    def text(self) -> str:
        """What the backend has made of the graph."""
        return "\n".join(p.text if isinstance(p, Reason) else p.text() for _, p in self._variants)

    def find(self, numbers: Sequence[PythonNumber]) -> Program | Reason | None:
        """The program that was compiled for these numbers."""
        return next((program for guard, program in self._variants if guard.accepts(numbers)), None)

    def constants(self, program: Program) -> Mapping[int, PythonNumber]:
        """The numbers that are constants to one of the programs."""
        return next(guard.constants for guard, made in self._variants if made is program)

    def accept(self, program: Program | Reason | None, symbols: Symbols) -> bool:
        """Whether a program is right for these sizes; if there is none for the numbers at hand, whether any is."""
        if program is None:
            return any(isinstance(p, Program) and p.accepts(symbols) for _, p in self._variants)
        return isinstance(program, Reason) or program.accepts(symbols)

    def add(self, variant: Variant) -> None:
        """Have another program."""
        if not self._variants and not variant.guard.constants and isinstance(variant.program, Program):
            self.unguarded = variant.program if variant.program.is_native else None
        self._variants.append(variant)

    # ---- another program, since a constant has changed

    def entry(self, numbers: Sequence[PythonNumber]) -> tuple[Entry[Variant], bool]:
        """The entry of numbers that no program was compiled for, and whether a program for them is certain to be of
        use: it takes what has changed as inputs."""
        if self.compiling is not None:
            return self.compiling, False
        if len(self._variants) >= limits.MAX_VARIANTS:
            count = f"{limits.MAX_VARIANTS} programs were compiled for other values already"
            refusal = Reason(f"{self.why(numbers)}, and {count}", unsupported=True)
            return Entry(State.REFUSED, reason=refusal), False
        last = self._variants[-1].guard
        self._varied |= frozenset(last.changed(numbers))
        refusals = self._refusals()
        constants = tuple((index, typed(numbers[index])) for index in refusals)
        entry = self._entries.get(constants)
        if entry is None or entry.state is State.READY:
            if len(self._entries) >= limits.MAX_SEEN_CONSTANTS:
                self._entries.clear()
            entry = self._entries[constants] = Entry()
        return entry, last.agrees(numbers, refusals)

    @property
    def has_met_many(self) -> bool:
        """Whether numbers that no program was compiled for are more than there will be programs."""
        return len(self._entries) > limits.MAX_VARIANTS

    def why(self, numbers: Sequence[PythonNumber]) -> str:
        """Why no program takes these numbers."""
        return self._variants[-1].guard.explain(numbers)

    def compile(self, numbers: Sequence[PythonNumber], build: Build) -> Variant:
        """A program for these numbers; those that cannot be inputs are constants of it. Changes nothing here."""
        refusals = self._refusals()
        constants = {index: numbers[index] for index in refusals if index not in self._sized}
        program: Program | Reason
        try:
            program = self._program(constants, build)
            build.text = program.text
        except Unsupported as error:
            if not self._variants:
                raise
            program = unsupported(self._backend, error)
        return Variant(NumberGuard(constants, refusals), program)

    def _program(self, constants: Mapping[int, PythonNumber], build: Build) -> Program:
        backend = self._backend
        graph = self._ready(self._graph, constants)
        build.keep("lowered", graph)
        yield_to_user()
        parts = None
        if C.can_run_ahead(backend.device) and backend.runs_ahead(graph):
            parts = split(graph, *self._positions, little_late=torch.device(backend.device).type != "cpu")
            yield_to_user()
        return Program(backend, graph, build, parts=parts)

    def _ready(self, graph: Graph, constants: Mapping[int, PythonNumber]) -> Graph:
        """The graph as the backend is given it, with these numbers as constants."""
        backend = self._backend
        graph = specialize(graph, constants)
        yield_to_user()
        if self._lowerings:
            graph = lower(graph, self._lowerings)
        graph = decompose(graph, self._decompositions, partial(compiles, backend))
        if backend.capabilities.updates_in_place:
            return safe_updates(graph, torch.device(backend.device).type)
        return replace(graph, replaces=(None,) * len(graph.outputs))

    def _refusals(self) -> dict[int, Node]:
        """The numbers that cannot be inputs, each with a node that needs its value."""
        if self._refused is not None and self._refused[0] == self._varied:
            return self._refused[1]
        backend, varied = self._backend, self._varied
        found: dict[int, Node] = {}
        for node in self._graph.nodes:
            numbers = [leaf for leaf in leaves(node.args) if isinstance(leaf, Number) and leaf.kind != "seed"]
            if not numbers:
                continue
            if node.op in self._lowerings:
                refused = numbers  # as for a decomposition
            elif compiles(backend, node):
                refused = [n for n in numbers if not backend.takes_number(node, n, n.index in varied)]
            elif is_decomposed(node, self._decompositions):
                refused = numbers  # a decomposition is made for their values
            else:
                continue  # on the real device, a number is taken as it comes
            for number in refused:
                found.setdefault(number.index, node)
        self._refused = (varied, found)
        return found


class NumberGuard:
    """The numbers that are constants of a program. Their types are part of the graph's structure; their values have to
    be compared: -0.0 is not 0.0, and NaN is NaN."""

    def __init__(self, constants: Mapping[int, PythonNumber], refusals: Mapping[int, Node]) -> None:
        self.constants = constants
        self._refusals = refusals
        plain = [index for index, value in constants.items() if _plain(value)]
        self._pick = itemgetter(*plain) if plain else None
        self._expected = self._pick(constants) if self._pick else None
        self._special = [(index, type(v), repr(v)) for index, v in constants.items() if not _plain(v)]

    def accepts(self, numbers: Sequence[PythonNumber]) -> bool:
        if self._pick is not None and self._pick(numbers) != self._expected:
            return False
        for index, kind, text in self._special:  # as `typed` compares them
            number = numbers[index]
            if type(number) is not kind or repr(number) != text:
                return False
        return True

    def changed(self, numbers: Sequence[PythonNumber]) -> list[int]:
        return [index for index, value in self.constants.items() if typed(numbers[index]) != typed(value)]

    def agrees(self, numbers: Sequence[PythonNumber], indices: Iterable[int]) -> bool:
        """Whether these of the numbers are what they were."""
        return all(
            index in self.constants and typed(numbers[index]) == typed(self.constants[index]) for index in indices
        )

    def explain(self, numbers: Sequence[PythonNumber]) -> str:
        index = self.changed(numbers)[0]
        node = self._refusals[index]
        where = f" at {node.site}" if node.site else ""
        return f"a number of {node.op}{where} was {self.constants[index]} and is {numbers[index]} now"


def _plain(number: PythonNumber) -> bool:
    """Whether a number is equal to itself and to no other of its type."""
    return isinstance(number, int) or (isinstance(number, float) and number == number and number != 0.0)


def unsupported(backend: Backend, error: Unsupported) -> Reason:
    """Why a step is not compiled, and which operator the backend refused, at which line."""
    where = ""
    if isinstance(error.node, Node):
        where = f" ({error.node.op}" + (f" at {error.node.site})" if error.node.site else ")")
    return Reason(f"backend {backend.name!r} does not compile this step{where}: {error.reason}", unsupported=True)
