"""Programs made of programs: a graph whose pieces repeat (passes/pieces.py) has each kind of piece compiled once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tarry import events
from tarry.backends.base import Computation, PythonNumber
from tarry.config import config
from tarry.ir.graph import Graph
from tarry.native import C
from tarry.passes.pieces import NOWHERE, Call, Pieces, pieces
from tarry.runtime.compile.computations import Build, Sizes
from tarry.runtime.compile.jobs import yield_to_user


def compile_graph(build: Build, graph: Graph, sizes: Sizes | None = None) -> Computation:
    """The computation of a graph, in pieces if enough of it repeats. `sizes`: of one whose sizes vary, which stays
    whole."""
    backend = build.backend
    found = pieces(graph) if sizes is None and config.compile_pieces and backend.capabilities.pieces else None
    yield_to_user()
    if found is None:
        return build.computation(graph, sizes)
    parts = [build.computation(piece) for piece in found.graphs]
    events.emit("pieces", calls=len(found.calls), kinds=len(parts))
    return backend.compose(graph, found, parts) or _composed(graph, found, parts)


def _composed(graph: Graph, made: Pieces, parts: Sequence[Computation]) -> Computation:
    """The pieces one after the other, natively if all of them are."""
    in_place = made.in_place([part.in_place for part in parts])
    native = None
    if all(part.native is not None for part in parts):
        calls = [_native_call(call, parts[call.graph]) for call in made.calls]
        native = C.sequence(
            made.registers, calls, [NOWHERE if k in in_place else r for k, r in enumerate(made.outputs)]
        )

    def run(inputs: list[Any], numbers: list[PythonNumber]) -> list[Any]:
        registers = [*inputs, *([None] * (made.registers - len(inputs)))]
        inputs.clear()
        for call in made.calls:
            part = parts[call.graph]
            taken = [registers[k] for k in call.takes]
            for k in part.in_place:
                registers[call.gives[k]] = taken[_replaced(part, k)]
            for k in call.drops:
                registers[k] = None
            results = part.run(taken, [numbers[k] for k in call.numbers])
            for k, register in enumerate(call.gives):
                if register != NOWHERE and k not in part.in_place:
                    registers[register] = results[k]
        return [registers[k] for k in made.outputs]

    return Computation(run, graph, in_place, lambda: _text(made, parts), native)


def _native_call(call: Call, part: Computation) -> tuple[Any, Any, Any, Any, Any, Any]:
    updates = [_replaced(part, k) if k in part.in_place else NOWHERE for k in range(len(call.gives))]
    return part.native, call.takes, call.gives, call.numbers, call.drops, updates


def _replaced(part: Computation, output: int) -> int:
    replaced = part.graph.replaces[output]
    assert replaced is not None  # computations.checked has checked it
    return replaced


def _text(made: Pieces, parts: Sequence[Computation]) -> str:
    counts = Counter(call.graph for call in made.calls)
    order = " ".join(str(call.graph) for call in made.calls)
    texts = [f"# piece {k}, run {counts[k]} times\n{part.backend_text}" for k, part in enumerate(parts)]
    return "\n\n".join([f"# pieces in order: {order}", *texts])
