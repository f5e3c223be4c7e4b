"""Graphs that a backend knows only in part: the parts that it knows are compiled, the rest runs on the real device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tarry.backends.base import Backend
from tarry.ir.graph import Graph, Node, Number, Value, leaves, producers
from tarry.ir.layout import VIEW_RULES
from tarry.ir.operators import COLLECTIVES
from tarry.passes.overlap import overlapped
from tarry.passes.own_outputs import own_outputs
from tarry.passes.subgraph import subgraph, with_views

Supports = Callable[[Node], bool]


def compiles(backend: Backend, node: Node) -> bool:
    """Whether a node goes to the backend's compiler. Collectives do not: each has to run once, also if a program
    fails."""
    return node.op not in COLLECTIVES and backend.supports(node)


@dataclass(frozen=True)
class Part:
    """A piece of a graph, to be run in order: from `takes` to `gives`, which are values of the whole graph. Nothing
    after it needs the values in `drops`.

    `graph` is the piece as a graph of its own if the backend knows all of it; a piece of operators that it does not
    know has its nodes only. `numbers` are those of the whole graph that the piece's own are.
    """

    nodes: tuple[Node, ...]
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    drops: tuple[Value, ...]
    graph: Graph | None
    numbers: tuple[int, ...]


def partition(graph: Graph, supports: Supports) -> list[Part]:
    """Cut a graph into parts, as few as there can be, by putting off what is not needed yet; with collectives in it, as
    few as let these go on meanwhile (passes/overlap.py).

    A node goes into the last part of its kind that comes before everything that reads it. Views cost nothing, so each
    part makes those that it reads itself, of what it gets; except those that leave out elements, for data that cross a
    cut may have to be copied.
    """
    known = {id(node): bool(supports(node)) for node in graph.nodes}
    views = {node.results[0]: node for node in graph.nodes if known[id(node)] and _is_free(node)}
    if any(node.op in COLLECTIVES for node in graph.nodes):
        groups = []
        for run in overlapped(graph, views):
            members = set(map(id, (*run, *views.values())))
            those = [node for node in graph.nodes if id(node) in members]
            groups += [run] if len({known[id(node)] for node in run}) == 1 else _few_groups(those, known, views)
    else:
        groups = _few_groups(graph.nodes, known, views)
    groups = _with_returned_views(graph, groups, views)
    parts: list[Part] = []
    needed = set(graph.outputs)  # after the part at hand, which goes back to front
    for group in reversed(groups):
        nodes = with_views(graph, group, views)
        made = {value for node in nodes for value in node.results}
        takes = tuple(dict.fromkeys(value for node in nodes for value in node.operands if value not in made))
        gives = tuple(value for node in group for value in node.results if value in needed)
        drops = tuple(value for value in takes if value not in needed)
        needed.update(takes)
        numbers = _numbers_of(nodes)
        piece = _piece(graph, nodes, takes, gives, numbers, supports) if known[id(group[0])] else None
        parts.append(Part(nodes, takes, gives, drops, piece, tuple(number.index for number in numbers)))
    return parts[::-1]


def _is_free(node: Node) -> bool:
    """Whether a node is a view that shows all elements of what it looks at."""
    if node.op not in VIEW_RULES:
        return False
    seen, base = node.results[0].type, node.operands[0].type
    return seen.numel * seen.dtype.itemsize >= base.numel * base.dtype.itemsize


def _few_groups(nodes: Sequence[Node], known: dict[int, bool], views: dict[Value, Node]) -> list[list[Node]]:
    return min((_groups(nodes, known, views, last) for last in (True, False)), key=len)


def _groups(nodes: Sequence[Node], known: dict[int, bool], views: dict[Value, Node], last: bool) -> list[list[Node]]:
    """The nodes by part, in order, but for views; the last part is one that the backend knows, or not."""
    # Levels count from the end: parts of the one kind are at even levels, of the other at odd ones.
    read_at: dict[Value, int] = {}
    groups: dict[int, list[Node]] = {}
    for node in reversed(nodes):
        level = max((read_at.get(value, 0) for value in node.results), default=0)
        if not any(value in views for value in node.results):
            if level % 2 != (known[id(node)] is not last):
                level += 1
            groups.setdefault(level, []).append(node)
        for value in node.operands:
            read_at[value] = max(read_at.get(value, 0), level)
    return [groups[level][::-1] for level in sorted(groups, reverse=True)]


def _with_returned_views(graph: Graph, groups: list[list[Node]], views: dict[Value, Node]) -> list[list[Node]]:
    """A view that the graph returns is made where the buffer is made that it looks at."""
    made_by = producers(graph)
    group_of = {id(node): group for group in groups for node in group}
    for value in graph.outputs:
        if value in views:
            owner: Value = value
            while owner in views:
                (owner, *_) = views[owner].operands
            group = group_of.get(id(made_by.get(owner)))
            if group is None:  # an input's buffer
                if not groups:
                    groups.append([])
                group = groups[-1]
            if views[value] not in group:
                group.append(views[value])
    return groups


def _numbers_of(nodes: Sequence[Node]) -> list[Number]:
    """In the order of their use, so that parts which are alike have equal graphs."""
    used = [leaf for node in nodes for leaf in leaves((*node.args, node.seed)) if isinstance(leaf, Number)]
    return list({number.index: number for number in used}.values())


def _piece(
    graph: Graph,
    nodes: Sequence[Node],
    takes: Sequence[Value],
    gives: Sequence[Value],
    numbers: Sequence[Number],
    supports: Supports,
) -> Graph:
    piece = subgraph(graph, nodes, takes, gives, numbers=numbers)
    owned = own_outputs(piece)  # by copies, which have to be known as well
    return owned if all(supports(node) for node in owned.nodes[len(piece.nodes) :]) else piece
