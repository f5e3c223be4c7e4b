"""In which order a step runs, so that its collectives go on while it computes something else.

A collective is started as soon as what it reads is there, and waited for where its results are first read. So what
reads them is put off: until the next collective has started that does not need it, or until something needs it. Where
a collective gives more than it takes (the parameters of a layer), only one of a kind is started ahead: memory is what
such programs save.

Collectives keep the order of the program, and nothing here depends on the rank or on a clock: ranks with equal graphs
start equal collectives between equal parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tarry.ir.graph import Graph, Node, Value
from tarry.ir.operators import COLLECTIVES, operator

SMALL = 1 << 16
"""Bytes of a collective that is started where the step is cut anyway: a cut costs a few kernels' time, and fusion."""


def overlapped(graph: Graph, views: Mapping[Value, Node]) -> list[list[Node]]:
    """The nodes but for `views`, in an order in which they can run, and in runs: of collectives that start together, or
    of others, which wait for nothing or from their first node on."""
    schedule = _Schedule(graph, views)
    for node in graph.nodes:
        if not any(value in views for value in node.results):
            schedule.add(node)
    schedule.finish()
    return schedule.runs


def _is_small(node: Node) -> bool:
    return max(value.type.nbytes for value in (*node.operands, *node.results)) < SMALL


class _Schedule:
    def __init__(self, graph: Graph, views: Mapping[Value, Node]) -> None:
        self.runs: list[list[Node]] = []
        self._views = views
        self._place = {id(node): k for k, node in enumerate(graph.nodes)}
        self._put_off: dict[int, Node] = {}  # by place, in order
        self._maker: dict[Value, Node] = {}  # of what is put off
        self._bits: dict[int, int] = {}  # of collectives, by place
        self._kinds: dict[Any, int] = {}  # of those that are alike
        self._waits = False  # whether the last run does, and may go on with others that do
        self._live = 0  # of those that are put off, or that nothing has waited for
        self._behind: dict[Value, int] = {}  # of those that come before a value
        self._outstanding: dict[Value, int] = {}

    def add(self, node: Node) -> None:
        """The next one in the order of the program."""
        behind = 0
        for value in self._sources(node):
            behind |= self._behind.get(value, 0)
        collective = node.op in COLLECTIVES
        if collective:
            bit = 1 << len(self._bits)
            self._bits[self._place[id(node)]] = bit
            self._live |= bit
            behind |= bit
        self._waits = False
        if not behind & self._live or (collective and not _is_small(node)):
            self._need(node)
            if collective and operator(node.op).fresh:
                self._catch_up(node)
            return
        self._put_off[self._place[id(node)]] = node
        for value in node.results:
            self._maker[value] = node
            self._behind[value] = behind

    def finish(self) -> None:
        self._waits = False
        for node in list(self._put_off.values()):
            self._run(node)

    def _sources(self, node: Node) -> list[Value]:
        """What a node reads, seen through views."""
        found = []
        for value in node.operands:
            while value in self._views:
                value = self._views[value].operands[0]
            found.append(value)
        return found

    def _need(self, node: Node) -> None:
        """Run a node, and before it all that it needs."""
        needed, waiting = {self._place[id(node)]: node}, [node]
        while waiting:
            for value in self._sources(waiting.pop()):
                maker = self._maker.get(value)
                if maker is not None and self._place[id(maker)] not in needed:
                    needed[self._place[id(maker)]] = maker
                    waiting.append(maker)
        for place in sorted(needed):
            self._run(needed[place])

    def _catch_up(self, started: Node) -> None:
        """Run what was put off because of earlier collectives of this kind, and only of these."""
        self._waits = False
        kind, live = (started.op, started.args[-1]), self._live
        alike = self._kinds.get(kind, 0) & live
        self._kinds[kind] = alike | self._bits[self._place[id(started)]]
        for node in list(self._put_off.values()):
            behind = self._behind[node.results[0]] & live
            if node.op not in COLLECTIVES and behind & alike and not behind & ~alike:
                self._need(node)

    def _run(self, node: Node) -> None:
        place = self._place[id(node)]
        awaited = {self._outstanding[value] for value in self._sources(node) if value in self._outstanding}
        for bit in awaited:
            self._live &= ~bit
        self._outstanding = {value: bit for value, bit in self._outstanding.items() if bit not in awaited}
        starts = node.op in COLLECTIVES
        switches = not self.runs or starts is not (self.runs[-1][0].op in COLLECTIVES)
        if switches or (awaited and not starts and not self._waits):
            self.runs.append([])
            self._waits = bool(awaited)
        self.runs[-1].append(node)
        self._put_off.pop(place, None)
        for value in node.results:
            self._maker.pop(value, None)
            self._behind.pop(value, None)
        if starts:
            for value in node.results:
                if value is not node.outputs[-1]:  # the order, which nothing waits for
                    self._outstanding[value] = self._behind[value] = self._bits[place]
