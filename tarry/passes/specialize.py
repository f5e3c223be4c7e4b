"""Make some numbers of a graph constants of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tarry.ir.graph import Graph, GraphBuilder, Number, map_leaves

_PYTHON = {torch.int64: int, torch.float64: float, torch.bool: bool, torch.complex128: complex}


def specialize(graph: Graph, constants: Mapping[int, int | float | complex]) -> Graph:
    """The graph with these values in place of the numbers of these indices. The signature stays: numbers that are
    constants now are still among the graph's numbers, but nothing uses them. One that stood in for a tensor becomes a
    plain Python number in that place, which PyTorch's operators take for what it was."""
    if not constants:
        return graph

    def constant(leaf: Any) -> Any:
        if isinstance(leaf, Number) and leaf.index in constants:
            return _PYTHON[leaf.dtype](constants[leaf.index])
        return leaf

    builder = GraphBuilder(graph)
    for node in graph.nodes:
        builder.copy(node, args=map_leaves(builder.resolve(node.args), constant))
    return builder.finish()
