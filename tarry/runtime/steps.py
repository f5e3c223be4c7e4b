"""The programs of a step: which numbers are inputs and which constants, and what happens when a constant changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Protocol, TypeAlias

import torch

from tarry import events
from tarry.backends.base import Backend, Batch, Computation, PythonNumber
from tarry.config import config
from tarry.errors import FallbackError, Unsupported
from tarry.ir.build import from_raw
from tarry.ir.graph import Graph, Node, Number, leaves, typed
from tarry.native import C
from tarry.passes.decompose import decompose, is_decomposed, named
from tarry.passes.donation import safe_updates
from tarry.passes.lowerings import lowerings_for
from tarry.passes.pipeline import run
from tarry.passes.specialize import specialize
from tarry.passes.split import split
from tarry.runtime.background import breathe
from tarry.runtime.computations import Sizes
from tarry.runtime.program import CompiledProgram

MAX_VARIANTS = 8
"""Programs for one graph that differ in the constants they were compiled with. After that many, the graph is
interpreted: compiling costs more than it saves."""


class Runnable(Protocol):
    """What computes a batch whose numbers it was made for, and commits the results."""

    def run(self, batch: Batch, numbers: list[PythonNumber]) -> None: ...
    def text(self) -> str: ...


Variant: TypeAlias = "tuple[_NumberGuard, Runnable]"


class Make(Protocol):
    """Has the backend compile a graph, or knows better (`computations.Maker`). `sizes`: of one whose sizes vary."""

    def __call__(self, graph: Graph, sizes: Sizes | None = None) -> Computation: ...


class Recording:
    """What compiling needs of a batch, taken while the batch is there: its nodes are used again by the next step."""

    def __init__(self, batch: Batch) -> None:
        self.key = batch.key
        self.num_operations = batch.num_operations
        self.numbers = batch.numbers()
        self.positions = batch.positions()
        self._raw = batch.raw()

    @cached_property
    def recorded(self) -> Graph:
        """The graph as it was recorded."""
        return from_raw(self._raw)

    @cached_property
    def lines(self) -> tuple[str, str] | None:
        """The lines of the program from which and to which it was recorded, if they are known."""
        lines = [f"{node['file']}:{node['line']}" for node in self._raw["nodes"] if node["file"]]
        return (lines[0], lines[-1]) if lines else None

    def describe(self) -> str:
        """A step, by its size and the lines of the program that it spans."""
        where = f", recorded from {self.lines[0]} to {self.lines[1]}" if self.lines else ""
        return f"a step of {self.num_operations} operators{where}"


Another: TypeAlias = "Callable[[CompiledStep, Batch, list[PythonNumber]], Runnable]"


class CompiledStep:
    """The programs of one structure of graph. They differ in the numbers that are constants to them."""

    def __init__(
        self, backend: Backend, recording: Recording, make: Make, guard: Callable[[], object], another: Another
    ) -> None:
        """`another` is asked what to run for a batch with numbers that no program was compiled for."""
        graph = recording.recorded
        breathe()
        self._set_up(backend, run(graph, backend.stage, between=breathe), guard, another)
        self._positions = recording.positions
        self.add(self.compile(recording.numbers, make))

    def _set_up(self, backend: Backend, graph: Graph, guard: Callable[[], object], another: Another) -> None:
        self._backend = backend
        self._graph = graph
        self._decompositions = named(backend.decompositions())
        self._lowerings = lowerings_for(backend.name)
        self._variants: list[Variant] = []
        self._varied: frozenset[int] = frozenset()
        self._refused: tuple[frozenset[int], dict[int, Node]] | None = None
        self._guard = guard
        self._ask_for_another = another

    def text(self) -> str:
        """What the backend has made of the graph."""
        return "\n".join(program.text() for _, program in self._variants)

    def __call__(self, batch: Batch) -> None:
        guard, program = self._variants[0]
        if guard.accepts_all and isinstance(program, CompiledProgram) and program.is_native:
            program.run_native(batch)  # it reads the numbers itself
            return
        numbers = batch.numbers()
        found = self.find(numbers)
        program = self._ask_for_another(self, batch, numbers) if found is None else found
        program.run(batch, numbers)

    def find(self, numbers: Sequence[PythonNumber]) -> Runnable | None:
        """The program that was compiled for these numbers."""
        return next((program for guard, program in self._variants if guard.accepts(numbers)), None)

    # ---- another program, since a constant has changed

    def why(self, numbers: Sequence[PythonNumber]) -> str:
        """Why no program takes these numbers."""
        return self._variants[-1][0].explain(numbers)

    @property
    def is_full(self) -> bool:
        """Whether there are so many programs that another is not worth it."""
        return len(self._variants) >= MAX_VARIANTS

    def vary(self, numbers: Sequence[PythonNumber]) -> bool:
        """Take note of what has changed. Whether a program that takes it as an input would take these numbers: then it
        is sure to be of use."""
        last, _ = self._variants[-1]
        self._varied |= frozenset(last.changed(numbers))
        return last.agrees(numbers, self._refusals())

    def constants(self, numbers: Sequence[PythonNumber]) -> tuple[Any, ...]:
        """What would be constant in a program for these numbers."""
        return tuple((index, typed(numbers[index])) for index in self._refusals())

    def add(self, variant: Variant) -> Runnable:
        """Have another program."""
        self._variants.append(variant)
        return variant[1]

    def compile(self, numbers: Sequence[PythonNumber], make: Make) -> Variant:
        """A program for these numbers; those that cannot be inputs are constants of it. Changes nothing here."""
        backend = self._backend
        refusals = self._refusals()
        constants = {index: numbers[index] for index in refusals}
        graph = self._ready(self._graph, constants)
        breathe()
        program: Runnable
        try:
            parts = None
            if C.can_run_ahead(backend.device) and backend.runs_ahead(graph):
                parts = split(graph, *self._positions, little_late=torch.device(backend.device).type != "cpu")
            breathe()
            program = CompiledProgram(backend, graph, make, self._guard, parts)
        except Unsupported as error:
            if not self._variants:
                raise
            program = InterpretedStep(unsupported_message(backend, error))
        return self._guarded(constants, refusals, program)

    @staticmethod
    def _guarded(constants: Mapping[int, PythonNumber], refusals: Mapping[int, Node], program: Runnable) -> Variant:
        return _NumberGuard(constants, refusals), program

    def _ready(self, graph: Graph, constants: Mapping[int, PythonNumber]) -> Graph:
        """The graph as the backend is given it, with these numbers as constants."""
        backend = self._backend
        graph = specialize(graph, constants)
        breathe()
        if self._lowerings:
            graph = decompose(graph, self._lowerings, lambda node: node.op not in self._lowerings)
        graph = decompose(graph, self._decompositions, backend.supports)
        in_place = backend.capabilities.updates_in_place
        return safe_updates(graph, torch.device(backend.device).type) if in_place else _without_updates(graph)

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
            elif backend.supports(node):
                refused = [n for n in numbers if not backend.takes_number(node, n, n.index in varied)]
            elif is_decomposed(node, self._decompositions):
                refused = numbers  # a decomposition is made for their values
            else:
                continue  # on the real device, a number is taken as it comes
            for number in refused:
                found.setdefault(number.index, node)
        self._refused = (varied, found)
        return found


class _NumberGuard:
    """The numbers that are constants of a program. Their types are part of the graph's structure; their values have to
    be compared: -0.0 is not 0.0, and NaN is NaN."""

    def __init__(self, constants: Mapping[int, PythonNumber], refusals: Mapping[int, Node]) -> None:
        self._constants = constants
        self._refusals = refusals
        self.accepts_all = not constants
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
        return [index for index, value in self._constants.items() if typed(numbers[index]) != typed(value)]

    def agrees(self, numbers: Sequence[PythonNumber], indices: Iterable[int]) -> bool:
        """Whether these of the numbers are what they were."""
        return all(
            index in self._constants and typed(numbers[index]) == typed(self._constants[index]) for index in indices
        )

    def explain(self, numbers: Sequence[PythonNumber]) -> str:
        index = self.changed(numbers)[0]
        node = self._refusals[index]
        where = f" at {node.site}" if node.site else ""
        return f"a number of {node.op}{where} was {self._constants[index]} and is {numbers[index]} now"


def _plain(number: PythonNumber) -> bool:
    """Whether a number is equal to itself and to no other of its type."""
    return isinstance(number, int) or (isinstance(number, float) and number == number and number != 0.0)


def _without_updates(graph: Graph) -> Graph:
    return replace(graph, replaces=(None,) * len(graph.outputs))


# ---- what cannot be compiled


@dataclass(frozen=True)
class InterpretedStep:
    """A step that the backend cannot compile: the reference path takes it, every time."""

    reason: str

    def __call__(self, batch: Batch) -> None:
        _interpret(batch, self.reason)

    def run(self, batch: Batch, numbers: list[PythonNumber]) -> None:
        _interpret(batch, self.reason)

    def text(self) -> str:
        return self.reason


@dataclass(frozen=True)
class ReferenceStep:
    """A step that has no program, or none yet, and does not have to have one: the reference path takes it."""

    reason: str

    def __call__(self, batch: Batch) -> None:
        events.emit("reference", key=batch.key, reason=self.reason)
        batch.interpret(interruptible=False)

    def run(self, batch: Batch, numbers: list[PythonNumber]) -> None:
        self(batch)

    def text(self) -> str:
        return self.reason


def _interpret(batch: Batch, reason: str) -> None:
    if config.fallback == "error":
        raise FallbackError(
            f"a step has to run on the reference path: {reason}; and tarry.config.fallback is 'error'. Avoid it there, "
            f"or set tarry.config.fallback = 'allow'."
        )
    events.emit("interpreted", key=batch.key, reason=reason)
    batch.interpret(interruptible=False)


def unsupported_message(backend: Backend, error: Unsupported) -> str:
    """Why a step is not compiled, and where the operator is that the backend stumbled over."""
    where = ""
    if isinstance(error.node, Node):
        where = f" ({error.node.op}" + (f" at {error.node.site})" if error.node.site else ")")
    return f"backend {backend.name!r} does not compile this step{where}: {error.reason}"
