"""Which outputs may be written into the buffer of the input that they replace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tarry.codegen.op_table import Fails, facts
from tarry.ir.graph import Graph, Node, Value

_INTEGERS = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)


def safe_updates(graph: Graph, device_type: str = "cpu") -> Graph:
    """The graph whose `replaces` only keeps outputs that no failure can leave half-written.

    If a step breaks off, every tensor has to have the contents it had before. So an output may only overwrite an input
    if everything that can fail comes before it in the flow of data, in whatever order the compiler runs the rest: then
    nothing is overwritten when something fails.
    """
    if not any(index is not None for index in graph.replaces):
        return graph
    checks: dict[Any, int] = {}  # what may fail, each with a bit
    behind: dict[Value, int] = dict.fromkeys(graph.inputs, 0)  # as a set of bits
    for node in graph.nodes:
        flows = 0
        for value in node.operands:
            flows |= behind[value]
        if _may_fail(node, device_type):
            flows |= checks.setdefault(_check(node), 1 << len(checks))
        for value in node.results:
            behind[value] = flows
    everything = (1 << len(checks)) - 1
    return replace(
        graph,
        replaces=tuple(
            index if index is not None and behind[value] == everything else None
            for value, index in zip(graph.outputs, graph.replaces, strict=True)
        ),
    )


def _may_fail(node: Node, device_type: str) -> bool:
    match facts(node.op).fails:
        case Fails.NEVER:
            return False
        case Fails.ON_INTEGERS:
            return any(value.type.dtype in _INTEGERS for value in node.results)
        case Fails.ON_INDEX:
            return device_type != "cuda"
    return True


def _check(node: Node) -> Any:
    """What the node checks: equal for nodes of which both fail or neither does."""
    positions = facts(node.op).index_arguments
    if not positions or not isinstance(node.args[0], Value):
        return id(node)
    return (node.args[0].type.sizes, tuple(node.args[position] for position in positions))
