"""Programs made of programs: a graph whose pieces repeat (passes/pieces.py) has each kind of piece compiled once."""

from __future__ import annotations

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
    if sizes is not None:
        return build.computation(graph, sizes)
    (made,) = compile_graphs(build, [graph])
    return made


def compile_graphs(build: Build, graphs: Sequence[Graph]) -> list[Computation]:
    """As `compile_graph`, for several graphs of a step, whose pieces are compiled together."""
    backend = build.backend
    split = config.compile_pieces and backend.capabilities.pieces
    found = [pieces(graph) if split else None for graph in graphs]
    yield_to_user()
    wanted = [(graph,) if made is None else made.graphs for graph, made in zip(graphs, found, strict=True)]
    computations = iter(build.computations([graph for each in wanted for graph in each]))
    parts = [[next(computations) for _ in each] for each in wanted]
    return [
        made[0] if cut is None else _joined(build, graph, cut, made)
        for graph, cut, made in zip(graphs, found, parts, strict=True)
    ]


def _joined(build: Build, graph: Graph, made: Pieces, parts: Sequence[Computation]) -> Computation:
    reason = f"{len(parts)} kinds of pieces repeat in it"
    events.emit("pieces", calls=len(made.calls), kinds=len(parts), reason=reason, **build.recording.place)
    return build.backend.compose(graph, made, parts) or _composed(graph, made, parts)


def _composed(graph: Graph, made: Pieces, parts: Sequence[Computation]) -> Computation:
    """The pieces one after the other, natively if all of them are."""
    updated = [part.in_place for part in parts]
    in_place = made.in_place(updated)
    native = None
    if all(part.native is not None for part in parts):
        calls = [_native_call(call, parts[call.graph]) for call in made.calls]
        native = C.sequence(
            made.registers, calls, [NOWHERE if k in in_place else r for k, r in enumerate(made.outputs)]
        )

    def run(inputs: list[Any], numbers: list[PythonNumber]) -> list[Any]:
        def run_call(position: int, taken: list[Any]) -> Sequence[Any]:
            call = made.calls[position]
            return parts[call.graph].run(taken, [numbers[k] for k in call.numbers])

        return made.run(inputs, updated, run_call)

    return Computation(run, graph, in_place, lambda: made.text([part.backend_text for part in parts]), native)


def _native_call(call: Call, part: Computation) -> tuple[Any, Any, Any, Any, Any, Any]:
    updates = [NOWHERE] * len(call.gives)
    for k in part.in_place:
        replaced = part.graph.replaces[k]
        assert replaced is not None  # computations.checked has checked it
        updates[k] = replaced
    return part.native, call.takes, call.gives, call.numbers, call.drops, updates
