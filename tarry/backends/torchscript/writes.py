"""Where a pure graph may be run by operators that write: into buffers that nothing reads any more.

An optimizer's update becomes an update of the parameter's own buffer again, and a chain of pointwise operators on
temporaries needs one buffer. What is decided here depends on the order of the nodes, so they must be run in that order.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tarry.codegen.op_table import facts
from tarry.ir.aliasing import windows
from tarry.ir.graph import Graph, Node, Value, leaves, producers
from tarry.ir.layout import VIEW_RULES, is_injective
from tarry.ir.operators import depends_on_schemas, operator, overload
from tarry.passes.donation import safe_updates
from tarry.passes.functional_forms import WritingForm, in_place_form

SCATTERS = {
    "aten::slice_scatter": "aten::slice.Tensor",
    "aten::select_scatter": "aten::select.int",
    "aten::diagonal_scatter": "aten::diagonal",
}
"""Operators that are a copy into a window on their first argument, with the operator that makes that window."""

_FRESH = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv"),
        *("aten::sum.dim_IntList", "aten::mean.dim", "aten::threshold_backward", "aten::gelu_backward"),
        *("aten::clone", "aten::_to_copy", "aten::full", "aten::cat", "aten::stack", "aten::index_put"),
        *SCATTERS,
    }
)
"""Operators besides the pointwise ones whose result surely has a buffer of its own. Some operators return an argument,
or two windows on one buffer, and their schemas do not say so."""

_ROUNDS_DIFFERENTLY = frozenset({"aten::mul.Scalar"})
"""Operators whose writing form gives other bits: mul_.Scalar rounds the number to the tensor's dtype first."""


@dataclass(frozen=True, slots=True)
class Writes:
    """`nodes`: positions of the nodes that may write into the operands they overwrite. `outputs`: those outputs of the
    graph that then lie in the buffer of the input they replace."""

    nodes: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    first: int | None = None
    """The position of the first node that writes into an input."""


@depends_on_schemas
@functools.cache
def writing_form(op: str) -> WritingForm | None:
    """The form of an operator that writes to what it reads, where it computes the same bits."""
    return None if operator(op).random or op in _ROUNDS_DIFFERENTLY else in_place_form(op)


def written_pairs(node: Node) -> list[tuple[Value, Value]]:
    """The results that a writing form of the node would put in place of an operand, each with that operand."""
    if node.op in SCATTERS:
        base = node.args[0]
        return [(node.results[0], base)] if isinstance(base, Value) else []
    if node.kept:
        indices = operator(node.op).written
    else:
        form = writing_form(node.op)
        if form is None:
            return []
        indices = tuple(form.args[index] for index in operator(form.op).written)
    operands = [leaf for index in indices for leaf in leaves(node.args[index]) if isinstance(leaf, Value)]
    results = node.outputs[len(node.outputs) - len(operands) :]
    return [(result, operand) for result, operand in zip(results, operands, strict=True) if result is not None]


def plan_writes(graph: Graph) -> Writes:
    """Which nodes may write. `graph.replaces` says which inputs may be overwritten at all."""
    return _Planner(graph).plan()


class _Planner:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.owner = {value: owner for value, (owner, _) in windows(graph).items()}
        self.made_by = producers(graph)
        self.last: dict[Value, int] = {}  # of each buffer's owner: the last node that reads it, through any window
        for k, node in enumerate(graph.nodes):
            for value in node.operands:
                self.last[self.owner[value]] = k
        for value in graph.outputs:
            self.last[self.owner[value]] = len(graph.nodes)
        self.pairs: dict[int, list[tuple[Value, Value]]] = {}  # by the position of the node
        self.chains: dict[int, list[int]] = {}  # by output: positions, from the last write back to the first

    def plan(self) -> Writes:
        graph = self.graph
        for k, node in enumerate(graph.nodes):
            pairs = written_pairs(node)
            if pairs and self._may_write(k, pairs):
                self.pairs[k] = pairs
        writes = {result: (k, operand) for k, pairs in self.pairs.items() for result, operand in pairs}
        for k, replaced in enumerate(graph.replaces):
            chain = [] if replaced is None else _chain(graph.outputs[k], graph.inputs[replaced], writes)
            if chain:
                self.chains[k] = chain
        if self.chains:
            safe = _first_safe(graph, min(chain[-1] for chain in self.chains.values()))
            self.chains = {k: chain for k, chain in self.chains.items() if chain[-1] >= safe}
        self._settle()
        first = min((chain[-1] for chain in self.chains.values()), default=None)
        return Writes(frozenset(self.pairs), frozenset(self.chains), first)

    def _may_write(self, position: int, pairs: list[tuple[Value, Value]]) -> bool:
        """Whether all operands that the node would overwrite are dead afterwards; inputs of the graph are looked at
        later (`_settle`)."""
        readings = Counter(self.owner[value] for value in self.graph.nodes[position].operands)
        for result, operand in pairs:
            owner = self.owner[operand]
            if not (
                result.type.matches(operand.type)
                and operand.type.numel == owner.type.numel  # so that no result lies in a part of a buffer
                and is_injective(operand.type.sizes, operand.type.strides)
                and self.last[owner] == position
                and readings[owner] == 1
                and _is_fresh(self.made_by.get(owner))
            ):
                return False
        return True

    def _settle(self) -> None:
        """Drop nodes that would write into an input without being part of a whole chain, and chains with such nodes,
        until neither is left: half a chain would leave an input overwritten that no output replaces."""
        inputs = {value: i for i, value in enumerate(self.graph.inputs)}
        while True:
            allowed = {(k, self.graph.replaces[output]) for output, chain in self.chains.items() for k in chain}
            wrong = [
                k
                for k, pairs in self.pairs.items()
                for _, operand in pairs
                if self.owner[operand] in inputs and (k, inputs[self.owner[operand]]) not in allowed
            ]
            if not wrong:
                return
            for k in wrong:
                self.pairs.pop(k, None)
            self.chains = {
                output: chain for output, chain in self.chains.items() if all(k in self.pairs for k in chain)
            }


def _chain(output: Value, target: Value, writes: Mapping[Value, tuple[int, Value]]) -> list[int]:
    """The positions of the writes that lead from an input to the output that replaces it, last first; empty if
    something else lies between."""
    chain: list[int] = []
    value = output
    while value != target:
        if value not in writes:
            return []
        position, value = writes[value]
        chain.append(position)
    return chain


def _is_fresh(producer: Node | None) -> bool:
    """Whether a value has a buffer to itself; inputs do if they may be written at all."""
    if producer is None or producer.kept:
        return True
    op = producer.op
    return op in _FRESH or facts(op).on_lists or (op not in VIEW_RULES and torch.Tag.pointwise in overload(op).tags)


def _first_safe(graph: Graph, wanted: int) -> int:
    """The first position, at or after the wanted one, from which on no node can fail on any data. Inputs are only
    written from there on: a step that breaks off must leave them as they were."""
    low, high = wanted, wanted if _cannot_fail(graph, wanted) else len(graph.nodes)
    while low < high:
        middle = (low + high) // 2
        if _cannot_fail(graph, middle):
            high = middle
        else:
            low = middle + 1
    return high


def _cannot_fail(graph: Graph, start: int) -> bool:
    """Whether nothing from a node on can fail: then it would be safe to overwrite something before they run."""
    before = tuple(value for node in graph.nodes[:start] for value in node.results)
    inputs = (*graph.inputs, *before)
    tail = Graph(inputs, graph.numbers, graph.nodes[start:], inputs[:1], (0,))
    return safe_updates(tail).replaces == (0,)
