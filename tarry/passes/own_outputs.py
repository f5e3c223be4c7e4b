"""Give every output of the graph a buffer of its own."""

from __future__ import annotations

from tarry.ir.aliasing import unowned_outputs
from tarry.ir.graph import Graph, GraphBuilder, Value, producers


def own_outputs(graph: Graph) -> Graph:
    """The graph with a copy of each output that is an input, a part of a bigger buffer, or shares one with another
    output. Each output becomes the content of a user's storage, so sharing would show as aliasing between tensors that
    the user never made views of each other. Merging common subexpressions and `a.copy_(b)` make such outputs."""
    shared = unowned_outputs(graph)
    if not shared:
        return graph
    builder = GraphBuilder(graph)
    made_by = producers(graph)
    for node in graph.nodes:
        builder.copy(node)
    outputs: list[Value] = [builder.resolve(value) for value in graph.outputs]
    for k in shared:
        outputs[k] = builder.one("aten::clone", (outputs[k], None), outputs[k].type, made_by.get(graph.outputs[k]))
    return builder.finish(outputs, graph.replaces)
