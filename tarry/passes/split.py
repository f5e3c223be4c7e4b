"""A graph in two parts, so that the first can run while the rest of the step is still being recorded.

What a node needs is known by the time its inputs have been recorded, often long before the node itself: a backward pass
reads what the forward pass has read. So the graph is cut at a moment of the recording, such that the early part is at
least half of the work, and as early as it can be. The late part has the rest, all updates among it. On a device that is
idle until the late part comes, the early part has as much more as is worth waiting for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tarry.ir.graph import Graph, GraphBuilder, Node, Number, Value, leaves, producers, users
from tarry.ir.layout import VIEW_RULES
from tarry.ir.operators import draws_nothing
from tarry.passes.own_outputs import own_outputs
from tarry.passes.subgraph import subgraph, with_views

WORTH = 16
"""Operators that the early part must have for a cut to be worth while."""
LATEST = 0.75
"""Of the recording: after that, there is too little left to run beside it."""


@dataclass(frozen=True)
class Split:
    """The two parts, and how they are put together.

    `early_takes` are inputs of the whole graph; so are `late_takes`, where -1 - k stands for result k of the early
    part; `outputs` are results of the late part, or -1 - k. `numbers` are all that the early part depends on, `seeds`
    those among them that are new in every step.
    """

    early: Graph
    late: Graph
    early_takes: tuple[int, ...]
    late_takes: tuple[int, ...]
    outputs: tuple[int, ...]
    numbers: tuple[int, ...]
    seeds: tuple[int, ...]


def split(
    graph: Graph, input_positions: Sequence[int], number_positions: Sequence[int], little_late: bool = False
) -> Split | None:
    """Cut a graph whose inputs and numbers were recorded at these positions; None if there is no good place. With
    `little_late`, the late part gets as little as possible without holding up the early part much.

    Numbers other than seeds are taken to be the same in every step, so they do not hold up what uses them.
    """
    graph = _with_updates_apart(graph)
    ready = _readiness(graph, input_positions, number_positions)
    moment = _moment(graph, ready, max((*input_positions, *number_positions), default=0), little_late)
    if moment is None:
        return None
    late_ids = _late(graph, {id(node) for node in graph.nodes if ready[id(node)] > moment} | _updates(graph))
    late_ids |= _only_for_late(graph, late_ids)
    early = [node for node in graph.nodes if id(node) not in late_ids]
    late = [node for node in graph.nodes if id(node) in late_ids]
    made_early = {value for node in early for value in node.results}
    if min(_work(early), _work(late)) == 0 or _work(early) < WORTH:
        return None
    # A view costs nothing to make again, while one that was made early could look at a buffer that a late node updates.
    views = {node.results[0]: node for node in early if node.op in VIEW_RULES}
    return _parts(graph, early, with_views(graph, late, views), made_early)


def _moment(graph: Graph, ready: dict[int, int], end: int, little_late: bool) -> int | None:
    """Where to cut a recording of this length: where half of the work has become known, or, with `little_late`, where
    most of it has in least of the time."""
    work = sorted(ready[id(node)] for node in graph.nodes if node.op not in VIEW_RULES)
    if len(work) < 2 * WORTH:
        return None
    moments = [moment for moment in work[len(work) // 2 :] if moment <= LATEST * end]
    if not moments:
        return None
    if not little_late:
        return moments[0]
    return max(moments, key=lambda moment: bisect_right(work, moment) / len(work) - moment / max(end, 1))


def _readiness(graph: Graph, input_positions: Sequence[int], number_positions: Sequence[int]) -> dict[int, int]:
    """For each node, the position at which all that it needs has been recorded.

    What activation checkpointing recomputes needs little, but is not wanted before the backward pass has come to it:
    made early, it would be kept until then, which it is recomputed to avoid. So from the first such node on, each waits
    for all that come before it.
    """
    known: dict[Value, int] = dict(zip(graph.inputs, input_positions, strict=True))
    ready: dict[int, int] = {}
    latest = 0
    in_order = False
    for node in graph.nodes:
        moments = [known[value] for value in node.operands]
        moments += [number_positions[number.index] for number in _numbers(node) if number.kind == "seed"]
        in_order = in_order or node.region > 0
        if in_order:
            moments.append(latest)
        ready[id(node)] = max(moments, default=0)
        latest = max(latest, ready[id(node)])
        known.update((value, ready[id(node)]) for value in node.results)
    return ready


def _with_updates_apart(graph: Graph) -> Graph:
    """The graph with new contents of inputs copied, where they are made together with something else, as those that are
    made when a batch is normalized. They can then be made early, and written into their buffers late."""
    made_by = producers(graph)
    together = [
        k
        for k, value in enumerate(graph.outputs)
        if graph.replaces[k] is not None and value in made_by and len(made_by[value].results) > 1
    ]
    together = [k for k in together if not set(made_by[graph.outputs[k]].results).issubset(graph.outputs)]
    if not together:
        return graph
    builder = GraphBuilder(graph)
    for node in graph.nodes:
        builder.copy(node)
    outputs = [builder.resolve(value) for value in graph.outputs]
    for k in together:
        outputs[k] = builder.one("aten::clone", (outputs[k], None), outputs[k].type, made_by[graph.outputs[k]])
    return builder.finish(outputs, graph.replaces)


def _updates(graph: Graph) -> set[int]:
    """The nodes whose only purpose is to update inputs: they are late, so that they can write into the buffers."""
    replacing = {value for value, index in zip(graph.outputs, graph.replaces, strict=True) if index is not None}
    updated: set[Value] = set()  # new contents of inputs, and what is computed from them
    for node in graph.nodes:
        # A node with other results too, such as one that normalizes a batch, is there for those.
        if replacing.issuperset(node.results) or not updated.isdisjoint(node.operands):
            updated.update(node.results)
    readers = users(graph)
    found: set[int] = set()
    for node in reversed(graph.nodes):
        if not updated.isdisjoint(node.results) and all(
            id(reader) in found for value in node.results for reader in readers[value]
        ):
            found.add(id(node))
    return found


def _late(graph: Graph, late: set[int]) -> set[int]:
    """Late nodes, and all that depends on them."""
    found = set(late)
    made: set[Value] = set()
    for node in graph.nodes:
        if id(node) in found or not made.isdisjoint(node.operands):
            found.add(id(node))
            made.update(node.results)
    return found


def _only_for_late(graph: Graph, late: set[int]) -> set[int]:
    """Nodes that take what is to be updated alone, and are read by late nodes alone, as in weight decay: made early,
    their results would only have to be kept."""
    readers = users(graph)
    made_by = producers(graph)
    returned = set(graph.outputs)
    updated = {
        graph.inputs[index]
        for value, index in zip(graph.outputs, graph.replaces, strict=True)
        if index is not None and value in made_by and id(made_by[value]) in late
    }
    return {
        id(node)
        for node in graph.nodes
        if updated.issuperset(node.operands)
        and all(id(reader) in late for value in node.results for reader in readers[value])
        and returned.isdisjoint(node.results)
    }


def _work(nodes: Iterable[Node]) -> int:
    return sum(node.op not in VIEW_RULES for node in nodes)


def _numbers(node: Node) -> Iterable[Number]:
    yield from (leaf for leaf in leaves(node.args) if isinstance(leaf, Number))
    if node.seed is not None and not draws_nothing(node.op, node.args):
        yield node.seed


def _parts(graph: Graph, early: Sequence[Node], late: Sequence[Node], made_early: set[Value]) -> Split | None:
    made_late = {value for node in late for value in node.results}
    inputs = {value: k for k, value in enumerate(graph.inputs)}
    # A view that is made in both belongs to the part that makes what it looks at, where the graph returns it.
    returned_early = [value for value in graph.outputs if value in made_early]
    if any(value in inputs for value in graph.outputs):
        return None
    read = list(dict.fromkeys(value for node in late for value in node.operands if value not in made_late))
    gives = list(dict.fromkeys((*(value for value in read if value in made_early), *returned_early)))
    if any(_owner(value, early) in inputs for value in gives):
        return None  # it could be handed over as it is, and be updated by the late part
    early_takes = _operands(early, made_early)
    replaced = [
        graph.inputs[index]
        for value, index in zip(graph.outputs, graph.replaces, strict=True)
        if index is not None and value not in made_early
    ]
    late_takes = list(dict.fromkeys((*read, *replaced)))
    late_gives = [k for k, value in enumerate(graph.outputs) if value not in made_early]
    position = {value: k for k, value in enumerate(late_takes)}
    late_replaces: list[int | None] = []
    for k in late_gives:
        index = graph.replaces[k]
        late_replaces.append(None if index is None else position[graph.inputs[index]])
    numbers = {number.index: number for node in early for number in _numbers(node)}
    return Split(
        early=own_outputs(subgraph(graph, early, early_takes, gives)),
        late=subgraph(graph, late, late_takes, [graph.outputs[k] for k in late_gives], late_replaces),
        early_takes=tuple(inputs[value] for value in early_takes),
        late_takes=tuple(inputs[value] if value in inputs else -1 - gives.index(value) for value in late_takes),
        outputs=tuple(
            -1 - gives.index(value) if value in made_early else late_gives.index(k)
            for k, value in enumerate(graph.outputs)
        ),
        numbers=tuple(numbers),
        seeds=tuple(index for index, number in numbers.items() if number.kind == "seed"),
    )


def _owner(value: Value, nodes: Iterable[Node]) -> Value:
    """The value whose buffer a value lies in, as far as views and copies tell."""
    sharing = (node for node in nodes if node.op in VIEW_RULES or node.op == "aten::clone")
    looked_at = {node.results[0]: node.operands[0] for node in sharing}
    while value in looked_at:
        value = looked_at[value]
    return value


def _operands(nodes: Iterable[Node], made: set[Value]) -> list[Value]:
    return list(dict.fromkeys(value for node in nodes for value in node.operands if value not in made))
