"""Pieces of a graph as graphs of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tarry.ir.graph import Graph, GraphBuilder, Node, Number, Value, map_leaves


def subgraph(
    graph: Graph,
    nodes: Iterable[Node],
    takes: Sequence[Value],
    gives: Sequence[Value],
    replaces: Sequence[int | None] | None = None,
    numbers: Sequence[Number] | None = None,
) -> Graph:
    """Some nodes as a graph from `takes` to `gives`, which are values of the whole one. It has these of its numbers, or
    all of them."""
    builder = GraphBuilder()
    given = graph.numbers if numbers is None else numbers
    own = {number.index: builder.number(number.kind, number.dtype, number.value) for number in given}
    table = {value: builder.input(value.type) for value in takes}

    def local(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return table[leaf]
        return own[leaf.index] if isinstance(leaf, Number) else leaf

    for node in nodes:
        types = [None if value is None else value.type for value in node.outputs]
        args, seed = map_leaves(node.args, local), local(node.seed)
        made = builder.node(node.op, args, types, site=node.site, region=node.region, kept=node.kept, seed=seed)
        table.update((old, new) for old, new in zip(node.outputs, made, strict=True) if old and new)
    return builder.finish([table[value] for value in gives], replaces)


def with_views(graph: Graph, nodes: Iterable[Node], views: Mapping[Value, Node]) -> tuple[Node, ...]:
    """Nodes with those of the views that they read, directly or through each other, in the order of the graph."""
    chosen = list(nodes)
    wanted = {id(node) for node in chosen}
    waiting = [value for node in chosen for value in node.operands]
    while waiting:
        node = views.get(waiting.pop())
        if node is not None and id(node) not in wanted:
            wanted.add(id(node))
            waiting.extend(node.operands)
    return tuple(node for node in graph.nodes if id(node) in wanted)
