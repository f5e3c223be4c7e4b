"""Graphs that a backend knows only in part: the parts that it knows are compiled, the rest runs on the real device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tarry.ir.graph import Graph, GraphBuilder, Node, Value


@dataclass(frozen=True)
class Part:
    """A piece of a graph, to be run in order: from `takes` to `gives`, which are values of the whole graph.

    `graph` is the piece as a graph of its own if the backend knows all of it; a piece of operators that it does not know
    has its nodes only. `numbers` of the piece are those of the whole graph.
    """

    nodes: tuple[Node, ...]
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    graph: Graph | None


def partition(graph: Graph, supports: Callable[[Node], bool]) -> list[Part]:
    """Cut a graph into parts, as few as can be had by putting off what is not needed yet.

    A node goes into the latest part of its own kind that comes after everything it reads.
    """
    level: dict[Value, int] = {value: 0 for value in graph.inputs}
    groups: dict[int, list[Node]] = {}
    for node in graph.nodes:
        known = bool(supports(node))
        # Even levels are compiled, odd ones run on the real device.
        place = max((level[value] for value in node.operands), default=0)
        if place % 2 != (0 if known else 1):
            place += 1
        groups.setdefault(place, []).append(node)
        for value in node.results:
            level[value] = place
    parts = []
    order = sorted(groups)
    needed_after: list[set[Value]] = []
    needed = set(graph.outputs)
    for place in reversed(order):
        needed_after.append(set(needed))
        for node in groups[place]:
            needed.update(node.operands)
    needed_after.reverse()
    for place, later in zip(order, needed_after, strict=True):
        nodes = tuple(groups[place])
        made = {value for node in nodes for value in node.results}
        takes = tuple(dict.fromkeys(value for node in nodes for value in node.operands if value not in made))
        gives = tuple(value for node in nodes for value in node.results if value in later)
        parts.append(Part(nodes, takes, gives, _subgraph(graph, nodes, takes, gives) if place % 2 == 0 else None))
    return parts


def _subgraph(graph: Graph, nodes: Sequence[Node], takes: Sequence[Value], gives: Sequence[Value]) -> Graph:
    builder = GraphBuilder()
    for number in graph.numbers:
        builder.number(number.kind, number.dtype, number.value)
    table = {value: builder.input(value.type) for value in takes}

    def local(arg: Any) -> Any:
        return tuple(local(item) for item in arg) if isinstance(arg, tuple) else table.get(arg, arg) if isinstance(
            arg, Value
        ) else arg

    for node in nodes:
        types = [None if value is None else value.type for value in node.outputs]
        made = builder.node(
            node.op, local(node.args), types, site=node.site, region=node.region, kept=node.kept, seed=node.seed
        )
        table.update((old, new) for old, new in zip(node.outputs, made, strict=True) if old is not None and new is not None)
    return builder.finish([table[value] for value in gives])
