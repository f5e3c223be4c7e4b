"""Compute what is computed twice only once."""

from __future__ import annotations

from typing import Any

from tarry.ir.graph import Graph, GraphBuilder, Value, typed
from tarry.ir.layout import VIEW_RULES
from tarry.ir.operators import STRIDED_VIEW, operator


def merge_common_subexpressions(graph: Graph) -> Graph:
    """The graph with equal nodes merged. What must *not* be merged:

    - nodes whose numbers are equal by chance: two number inputs are different inputs, whatever they were when recorded;
      a seed is such a number, so two dropouts stay two (one without a seed is merged with nothing);
    - a recomputed node with the one it recomputes: activation checkpointing trades time for memory on purpose. Nodes
      are merged within their region only, except views, which cost neither.
    """
    builder = GraphBuilder(graph)
    seen: dict[Any, tuple[Value | None, ...]] = {}
    for node in graph.nodes:
        args = builder.resolve(node.args)
        if operator(node.op).random and node.drawn_from is None:
            builder.copy(node, args=args)
            continue
        region = 0 if node.op == STRIDED_VIEW or node.op in VIEW_RULES else node.region
        types = tuple(None if value is None else value.type for value in node.outputs)
        key = (node.op, typed(args), types, region, node.seed)
        first = seen.get(key)
        if first is None:
            seen[key] = builder.copy(node, args=args)
            continue
        for old, new in zip(node.outputs, first, strict=True):
            if old is not None and new is not None:
                builder.replace(old, new)
    return builder.finish()
