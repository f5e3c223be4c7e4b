"""The order in which passes run, by name, with every stage kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tarry.errors import IRError
from tarry.ir.graph import Graph
from tarry.ir.verify import verify
from tarry.passes.common_subexpressions import merge_common_subexpressions
from tarry.passes.concatenate import concatenate_pieces
from tarry.passes.dead_code import eliminate_dead_code
from tarry.passes.functionalize import functionalize
from tarry.passes.own_outputs import own_outputs
from tarry.passes.views import recover_views


@dataclass(frozen=True, slots=True)
class Pass:
    """A step of a pipeline. `holds`: the verifier's stage whose rules its result obeys."""

    name: str
    run: Callable[[Graph], Graph]
    holds: str


DEFAULT = (
    Pass("functional", functionalize, "functional"),
    Pass("views", recover_views, "views"),
    Pass("cse", merge_common_subexpressions, "views"),
    Pass("dce", eliminate_dead_code, "views"),
    Pass("joined", concatenate_pieces, "views"),
    Pass("owned", own_outputs, "optimized"),
)
"""What every compiling backend gets."""


@dataclass(frozen=True, slots=True)
class Stages:
    """A graph at every stage of its way: 'recorded', then each pass by its name; 'optimized' is the last."""

    graphs: dict[str, Graph]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.graphs, "optimized")

    def __getitem__(self, stage: str) -> Graph:
        if stage == "optimized":
            return next(reversed(self.graphs.values()))
        if stage not in self.graphs:
            raise KeyError(f"no stage {stage!r}; there are {', '.join(self.names)}")
        return self.graphs[stage]

    @property
    def optimized(self) -> Graph:
        return self["optimized"]


def run_pipeline(
    graph: Graph,
    passes: Sequence[Pass] = DEFAULT,
    *,
    check: bool | None = None,
    between: Callable[[], None] = lambda: None,
) -> Stages:
    """Run the passes on a recorded graph and keep the result of each. `check` verifies the graph before the first and
    after every pass; by default only if the environment has TARRY_VERIFY=1. `between` is called after each."""
    if check is None:
        check = os.environ.get("TARRY_VERIFY", "") == "1"
    if check:
        verify(graph, "recorded")
    graphs = {"recorded": graph}
    for step in passes:
        graph = step.run(graph)
        if check:
            verify(graph, step.holds)
            _check_signature(graphs["recorded"], graph, step.name)
        graphs[step.name] = graph
        between()
    return Stages(graphs)


def run(
    graph: Graph,
    stage: str = "optimized",
    *,
    check: bool | None = None,
    between: Callable[[], None] = lambda: None,
    kept: dict[str, Graph] | None = None,
) -> Graph:
    """A recorded graph at one stage; passes after that stage are not run. `kept` is given the stages on the way."""
    names = ("recorded", *(step.name for step in DEFAULT), "optimized")
    if stage not in names:
        raise ValueError(f"no stage {stage!r}; there are {', '.join(names)}")
    stages = run_pipeline(graph, DEFAULT[: names.index(stage)], check=check, between=between)
    if kept is not None:
        kept.update(stages.graphs)
    return stages.optimized


def _check_signature(before: Graph, after: Graph, name: str) -> None:
    """A pass changes what is inside a graph, never its inputs, its numbers, or the types of its outputs."""
    same = (
        [value.type for value in before.inputs] == [value.type for value in after.inputs]
        and before.numbers == after.numbers
        and [value.type for value in before.outputs] == [value.type for value in after.outputs]
        and before.replaces == after.replaces
    )
    if not same:
        raise IRError(f"pass '{name}' changed the signature of the graph\nbefore:\n{before}\nafter:\n{after}")
