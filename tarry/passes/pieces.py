"""A graph in pieces, of which those that are alike share one program.

The layers of a network are recorded one after the other, alike but for the tensors that they read, and so are their
backward passes and the optimizer's updates of their parameters. A compiler that is given the whole step compiles each
of them anew. So the operators are written as a sequence of labels, repeats in it are looked for, and the sequence is
cut there, where least goes from one piece to the next. What does not repeat is left between, as pieces of its own.

Labels only propose. Two pieces are alike if they are equal as graphs, each with its inputs and numbers in the order in
which it uses them: `Graph` compares structure, never hashes. Views cost nothing: each piece makes those that it reads,
so that pieces hand over whole buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tarry.codegen.op_table import facts
from tarry.ir.graph import Graph, GraphBuilder, Node, Number, Value, leaves, map_leaves, typed
from tarry.ir.layout import VIEW_RULES
from tarry.passes.foreach import unroll_foreach
from tarry.passes.own_outputs import own_outputs

LEAST = 8
"""Operators of a piece that repeats: a call costs about as much as a small kernel, and nothing is fused across it."""
WORTH = 100
"""Operators that the compiler must be spared; below, the whole is compiled about as fast."""
SHARE = 0.3
"""Of the graph's operators that the compiler must be spared."""
TRIES = 16
"""Repeats of labels that are looked at closely, until one is a repeat of the graph."""
NOWHERE = -1


@dataclass(frozen=True)
class Call:
    """A piece: which of the graphs it is, from and to which registers (`NOWHERE`: that result is unused), and with
    which numbers of the whole graph. Nothing after it reads the registers in `drops`."""

    graph: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    numbers: tuple[int, ...]
    drops: tuple[int, ...]


@dataclass(frozen=True)
class Pieces:
    """The calls in order. The inputs of the whole graph are the first registers; its outputs are in `outputs`."""

    graphs: tuple[Graph, ...]
    calls: tuple[Call, ...]
    registers: int
    outputs: tuple[int, ...]

    def run(
        self, inputs: list[Any], updated: Sequence[frozenset[int]], run: Callable[[int, list[Any]], Sequence[Any]]
    ) -> list[Any]:
        """The outputs for some inputs, which are given away. `run` runs the call at a position on what it takes, and
        writes those results of its graph that are in `updated` into the inputs that they replace."""
        registers = [*inputs, *([None] * (self.registers - len(inputs)))]
        inputs.clear()
        for position, call in enumerate(self.calls):
            written = updated[call.graph]
            taken = [registers[k] for k in call.takes]
            for k in written:
                replaced = self.graphs[call.graph].replaces[k]
                assert replaced is not None
                registers[call.gives[k]] = taken[replaced]
            for k in call.drops:
                registers[k] = None
            for k, result in enumerate(run(position, taken)):
                if call.gives[k] != NOWHERE and k not in written:
                    registers[call.gives[k]] = result
        return [registers[k] for k in self.outputs]

    def text(self, texts: Sequence[str]) -> str:
        """Which piece comes when, and the text of each."""
        counts = Counter(call.graph for call in self.calls)
        order = " ".join(str(call.graph) for call in self.calls)
        parts = [f"# piece {k}, run {counts[k]} times\n{text}" for k, text in enumerate(texts)]
        return "\n\n".join([f"# pieces in order: {order}", *parts])

    def in_place(self, updated: Sequence[frozenset[int]]) -> frozenset[int]:
        """The outputs that are written into inputs, given those results of each graph that its program does so with."""
        written = {call.gives[k] for call in self.calls for k in updated[call.graph]}
        return frozenset(k for k, register in enumerate(self.outputs) if register in written)


def pieces(graph: Graph) -> Pieces | None:
    """The pieces of a graph that updates inputs only where that is safe (donation.py); None if too little repeats."""
    if sum(len(node.outputs) for node in graph.nodes) <= WORTH or not set(graph.inputs).isdisjoint(graph.outputs):
        return None
    flat = unroll_foreach(graph)
    steps = _Steps(flat, _in_order(graph, flat))
    cuts = steps.cuts()
    if not cuts:
        return None
    return _assemble(steps, [_Piece(steps, nodes) for nodes in steps.between(cuts)])


def _in_order(graph: Graph, flat: Graph) -> list[Node]:
    """The operators of the unrolled graph, without views. Operators on lists that follow each other are taken apart by
    element, not by operator: the update of one parameter stays together."""
    lists = [facts(node.op).element is not None and not node.kept for node in graph.nodes]
    counts = [len(node.outputs) if listed else 1 for node, listed in zip(graph.nodes, lists, strict=True)]
    origins = [listed for listed, count in zip(lists, counts, strict=True) for _ in range(count)]
    ordered: list[Node] = []
    run: list[Node] = []
    for node, listed in zip(flat.nodes, origins, strict=True):
        if node.op in VIEW_RULES:
            continue
        if listed:
            run.append(node)
        else:
            ordered += [*_by_element(run, flat), node]
            run = []
    return ordered + _by_element(run, flat)


def _by_element(run: Sequence[Node], graph: Graph) -> list[Node]:
    """Nodes of a run, those together that are connected by what they make."""
    if not run:
        return []
    owners = _owners(graph)
    chain: dict[Value, list[Node]] = {}
    chains: dict[int, list[Node]] = {}
    position = {id(node): k for k, node in enumerate(run)}
    for node in run:
        joined = {id(chain[base]): chain[base] for base in map(owners.__getitem__, node.operands) if base in chain}
        merged = [*sorted((n for part in joined.values() for n in part), key=lambda n: position[id(n)]), node]
        for part in joined:
            del chains[part]
        chains[id(merged)] = merged
        chain.update((value, merged) for member in merged for value in member.results)
    return [node for part in sorted(chains.values(), key=lambda part: position[id(part[0])]) for node in part]


def _owners(graph: Graph, through: frozenset[str] = frozenset()) -> dict[Value, Value]:
    """For each value the one whose buffer it looks at, as far as views and operators in `through` tell."""
    found = {value: value for value in graph.inputs}
    for node in graph.nodes:
        looks = node.op in VIEW_RULES or node.op in through
        found.update((value, found[node.operands[0]] if looks else value) for value in node.results)
    return found


class _Repeat(NamedTuple):
    saved: int
    period: int
    start: int
    end: int


class _Steps:
    """The operators of a graph as a sequence, and where it repeats."""

    def __init__(self, graph: Graph, nodes: list[Node]) -> None:
        self.graph = graph
        self.nodes = nodes
        self.views = {node.results[0]: node for node in graph.nodes if node.op in VIEW_RULES}
        self.owners = _owners(graph)
        returned = [value for value in graph.outputs if value in self.views]
        self.returned: dict[Value, list[Value]] = {}  # views that the graph returns, by what they look at
        for value in returned:
            self.returned.setdefault(self.owners[value], []).append(value)
        known: dict[Any, int] = {}
        described: dict[Value, Any] = {}
        self._labels = torch.tensor([known.setdefault(self._label(n, described), len(known)) for n in nodes])

    def _label(self, node: Node, described: dict[Value, Any]) -> Any:
        """What two nodes have in common that can be alike."""

        def stand_in(leaf: Any) -> Any:
            if isinstance(leaf, Number):
                return (leaf.kind, leaf.dtype)
            if not isinstance(leaf, Value):
                return typed(leaf)
            if leaf not in described:
                view = self.views.get(leaf)
                described[leaf] = leaf.type if view is None else (view.op, map_leaves(view.args, stand_in), leaf.type)
            return described[leaf]

        types = tuple(None if value is None else value.type for value in node.outputs)
        return (node.op, map_leaves(node.args, stand_in), types, node.kept, node.seed is None, node.region > 0)

    def between(self, cuts: Sequence[int]) -> Iterator[list[Node]]:
        """The operators piece by piece."""
        for begin, end in pairwise([0, *cuts, len(self.nodes)]):
            if begin < end:
                yield self.nodes[begin:end]

    def cuts(self) -> list[int]:
        """Where to cut, in order; empty if nothing repeats."""
        found: list[int] = []
        waiting = [(0, len(self.nodes))]
        while waiting:
            begin, end = waiting.pop()
            cuts = self._cuts_within(begin, end)
            if cuts:
                found += cuts
                waiting += [(begin, cuts[0]), (cuts[-1], end)]
        return sorted(found)

    def _cuts_within(self, begin: int, end: int) -> list[int]:
        """The cuts of the repeat in a part of the sequence that spares the compiler most."""
        for repeat in sorted(self._repeats(begin, end), key=lambda r: (-r.saved, r.period))[:TRIES]:
            cuts = self._cuts_of(repeat)
            parts = [self.nodes[a:b] for a, b in pairwise(cuts)]
            alike = {_Piece(self, part).skeleton for part in parts}
            if (len(parts) - len(alike)) * repeat.period * 2 >= repeat.saved:
                return cuts
        return []

    def _repeats(self, begin: int, end: int) -> Iterator[_Repeat]:
        """Where labels repeat at once: each as long as it can be."""
        labels = self._labels[begin:end]
        for period in range(LEAST, (end - begin) // 2 + 1):
            same = (labels[period:] == labels[:-period]).to(torch.int8)
            edges = torch.diff(same, prepend=same.new_zeros(1), append=same.new_zeros(1)).nonzero().flatten().tolist()
            for first, last in zip(edges[::2], edges[1::2], strict=True):
                count = (last - first) // period + 1
                if (count - 1) * period >= 2 * LEAST:
                    yield _Repeat((count - 1) * period, period, begin + first, begin + last + period)

    def _cuts_of(self, repeat: _Repeat) -> list[int]:
        """The cuts of a repeat, shifted such that as little as possible goes from one piece to the next."""
        _, period, start, end = repeat
        count = (end - start) // period
        crossing = self._crossing(start, end)
        shifts = range((end - start) % period + 1)
        shift = min(shifts, key=lambda s: sum(crossing[s + k * period] for k in range(count + 1)))
        return [start + shift + k * period for k in range(count + 1)]

    def _crossing(self, start: int, end: int) -> list[int]:
        """For each position what is made before and read after it: how many values, then how many bytes."""
        last: dict[Value, int] = {}
        made: dict[Value, int] = {}
        for position in range(start, end):
            node = self.nodes[position]
            last.update((self.owners[value], position) for value in node.operands)
            made.update((value, position) for value in node.results)
        change = [0] * (end - start + 2)
        for value, position in made.items():
            if value in last:
                weight = (1 << 48) + value.type.nbytes
                change[position - start + 1] += weight
                change[last[value] - start + 1] -= weight
        total = 0
        return [total := total + step for step in change]


class _Piece:
    """Some operators with the views that they read, as a graph that forgets where in the whole one it lies."""

    def __init__(self, steps: _Steps, nodes: Sequence[Node]) -> None:
        self._steps = steps
        self.size = len(nodes)
        self.nodes: list[Node] = []
        self.made: list[Value] = []
        self.takes: list[Value] = []
        self.numbers: list[Number] = []
        self._known: set[Value] = set()
        for node in nodes:
            self._add(node)
        for value in [view for made in self.made for view in steps.returned.get(made, ())]:
            self._need(value)
        self.skeleton = self.graph((), (), sites=False)

    def _add(self, node: Node) -> None:
        for value in node.operands:
            self._need(value)
        used = [leaf for leaf in leaves(node.args) if isinstance(leaf, Number)]
        self.numbers += [n for n in dict.fromkeys((*used, *filter(None, [node.seed]))) if n not in self.numbers]
        self.nodes.append(node)
        self.made += node.results
        self._known.update(node.results)

    def _need(self, value: Value) -> None:
        if value in self._known:
            return
        view = self._steps.views.get(value)
        if view is not None:
            self._add(view)
        else:
            self.takes.append(value)
            self._known.add(value)

    def graph(self, gives: Sequence[int], replaced: Sequence[tuple[int, Value]], sites: bool = True) -> Graph:
        """The graph that gives those values in `made`; `replaced` are positions in `gives`, and what they replace."""
        builder = GraphBuilder()
        table: dict[Value, Value] = {value: builder.input(value.type) for value in self.inputs(replaced)}
        numbers = {n.index: builder.number(n.kind, n.dtype, n.value) for n in self.numbers}
        regions = {0: 0}

        def local(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return table[leaf]
            return numbers[leaf.index] if isinstance(leaf, Number) else leaf

        for node in self.nodes:
            types = [None if value is None else value.type for value in node.outputs]
            made = builder.node(
                node.op,
                map_leaves(node.args, local),
                types,
                site=node.site if sites else None,
                region=regions.setdefault(node.region, len(regions)),
                kept=node.kept,
                seed=local(node.seed),
            )
            table.update((old, new) for old, new in zip(node.outputs, made, strict=True) if old and new)
        positions = {value: k for k, value in enumerate(self.inputs(replaced))}
        replaces: list[int | None] = [None] * len(gives)
        for position, value in replaced:
            replaces[position] = positions[value]
        return builder.finish([table[self.made[k]] for k in gives], replaces)

    def inputs(self, replaced: Sequence[tuple[int, Value]]) -> list[Value]:
        """What it takes: also what it replaces without reading it."""
        return list(dict.fromkeys((*self.takes, *(value for _, value in replaced))))


class _Kind:
    """Pieces that are alike: they share one graph, which gives what any of them has to give."""

    def __init__(self, members: list[_Piece], wanted: set[Value], replaced: dict[Value, Value]) -> None:
        self.members = members
        spread = zip(*(piece.made for piece in members), strict=True)
        self.gives = [k for k, values in enumerate(spread) if not wanted.isdisjoint(values)]
        self._replaced = replaced  # what each output replaces, of those that are safe for all

    def updates(self, piece: _Piece) -> list[tuple[int, Value]]:
        """Those results of a piece that replace inputs in all pieces of the kind, in the same way."""
        ways = [self._ways(member) for member in self.members]
        common = [k for k in ways[0] if all(way.get(k, None) == ways[0][k] for way in ways)]
        return [(k, self._replaced[piece.made[self.gives[k]]]) for k in common]

    def _ways(self, piece: _Piece) -> dict[int, int]:
        """For each result that replaces an input, which of those that the piece reads; -1 if it reads it not at all."""
        found = {k: self._replaced[value] for k in range(len(self.gives)) if (value := self._value(piece, k))}
        return {k: piece.takes.index(value) if value in piece.takes else -1 for k, value in found.items()}

    def _value(self, piece: _Piece, k: int) -> Value | None:
        value = piece.made[self.gives[k]]
        return value if value in self._replaced else None


def _assemble(steps: _Steps, parts: list[_Piece]) -> Pieces | None:
    members: dict[Graph, list[_Piece]] = {}
    for piece in parts:
        members.setdefault(piece.skeleton, []).append(piece)
    saved = sum((len(alike) - 1) * alike[0].size for alike in members.values())
    if saved < max(WORTH, SHARE * len(steps.nodes)):
        return None
    graph = steps.graph
    wanted = {value for piece in parts for value in piece.takes}.union(graph.outputs)
    if not wanted.issubset((*graph.inputs, *(value for piece in parts for value in piece.made))):
        return None  # a view of an input is returned
    replaced = _safe(steps, parts)
    kinds = {skeleton: _Kind(alike, wanted, replaced) for skeleton, alike in members.items()}
    order = {skeleton: k for k, skeleton in enumerate(kinds)}
    graphs = tuple(
        own_outputs(kind.members[0].graph(kind.gives, kind.updates(kind.members[0]))) for kind in kinds.values()
    )
    register = {value: k for k, value in enumerate(graph.inputs)}
    calls = []
    for piece in parts:
        kind = kinds[piece.skeleton]
        takes = tuple(register[value] for value in piece.inputs(kind.updates(piece)))
        given = [piece.made[k] for k in kind.gives]
        for value in given:
            if value in wanted:
                register[value] = len(register)
        gives = tuple(register.get(value, NOWHERE) for value in given)
        calls.append(Call(order[piece.skeleton], takes, gives, tuple(n.index for n in piece.numbers), ()))
    outputs = tuple(register[value] for value in graph.outputs)
    return Pieces(graphs, _with_drops(calls, outputs), len(register), outputs)


def _with_drops(calls: Sequence[Call], outputs: Sequence[int]) -> tuple[Call, ...]:
    needed = set(outputs)  # after the call at hand, which goes back to front
    found = []
    for call in reversed(calls):
        found.append(replace(call, drops=tuple(k for k in dict.fromkeys(call.takes) if k not in needed)))
        needed.update(call.takes)
    return tuple(found[::-1])


def _safe(steps: _Steps, parts: Sequence[_Piece]) -> dict[Value, Value]:
    """What each output replaces, where it may be written into that input's buffer: no other piece looks at the old
    contents any more, not even by a copy, for a compiler may hand over what is copied in place of the copy."""
    graph = steps.graph
    owners = _owners(graph, frozenset({"aten::clone"}))
    maker = {value: r for r, piece in enumerate(parts) for value in piece.made}
    looks: dict[Value, list[tuple[int, Value]]] = {}
    for r, piece in enumerate(parts):
        for value in piece.takes:
            looks.setdefault(owners[value], []).append((r, value))
    kept = {owners[value]: maker[value] for value in graph.outputs if owners[value] in set(graph.inputs)}
    found = {}
    for output, index in zip(graph.outputs, graph.replaces, strict=True):
        if index is None:
            continue
        old, r = graph.inputs[index], maker[output]
        late = any(s > r or (s == r and value != old) for s, value in looks.get(old, ()))
        if not late and kept.get(old, r) == r:
            found[output] = old
    return found
