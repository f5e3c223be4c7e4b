"""Take operators on lists of tensors apart, for backends that fuse better than a list kernel does."""

from __future__ import annotations

from typing import Any

from tarry.codegen.op_table import facts
from tarry.ir.graph import Graph, GraphBuilder, Node
from tarry.ir.operators import operator


def unroll_foreach(graph: Graph) -> Graph:
    """The graph with a node per tensor in place of each node on lists."""
    if not any(facts(node.op).on_lists for node in graph.nodes):
        return graph
    builder = GraphBuilder(graph)
    for node in graph.nodes:
        op = facts(node.op).element
        if op is None or node.kept:
            builder.copy(node)
            continue
        args = builder.resolve(node.args)
        for position, value in enumerate(node.outputs):
            assert value is not None
            builder.replace(value, builder.one(op, _arguments(node, op, args, position), value.type, node))
    return builder.finish()


def _arguments(node: Node, op: str, args: tuple[Any, ...], position: int) -> list[Any]:
    """The arguments of the single operator, for one element of the lists."""
    picked = [arg[position] if isinstance(arg, tuple) else arg for arg in args]
    if op == "aten::linalg_vector_norm":
        order, dtype = picked[1], picked[2]
        return [picked[0], order, None, False, dtype]
    wanted = operator(op).arguments
    return picked + [argument.default for argument in wanted[len(picked) :]]
