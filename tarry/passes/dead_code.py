"""Drop nodes whose results reach no output of the graph."""

from __future__ import annotations

from tarry.ir.graph import Graph, GraphBuilder, Value


def eliminate_dead_code(graph: Graph) -> Graph:
    """The graph without what its outputs do not need. Random nodes go too: each carries its own seed, so what one draws
    does not depend on another. Inputs and numbers stay, whether used or not: they are the graph's signature."""
    live: set[Value] = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if any(value in live for value in node.results):
            kept.append(node)
            live.update(node.operands)
    if len(kept) == len(graph.nodes):
        return graph
    builder = GraphBuilder(graph)
    for node in reversed(kept):
        builder.copy(node)
    return builder.finish()
