"""Lowering a graph node by node: the walk that backends share, whatever they lower to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from tarry.backends.base import Computation, PythonNumber, Run
from tarry.errors import BackendError
from tarry.ir.graph import Arg, Graph, Node, Number, Value, map_leaves, unread
from tarry.ir.text import node_text

T = TypeVar("T")


class LoweringContext(Generic[T]):
    """The state of a lowering: what each value has become, the parameters, the results, and which results take over the
    buffer of a parameter.

    Subclass it: `parameter` makes the counterpart of an input, `number` that of a number, `emit` that of a node. Then
    `lower()` walks the graph. A lowering can be partial: hand it values that are there already (`emitted`), or only the
    nodes that are wanted (`post_order` gives those behind some values).
    """

    def __init__(self, graph: Graph, emitted: Mapping[Value, T] | None = None) -> None:
        self.graph = graph
        self.emitted: dict[Value, T] = dict(emitted or {})
        self.parameters: list[T] = []
        self.results: list[T] = []
        self.aliases: dict[int, int] = {}
        self.emitted_nodes = 0

    # ---- what a subclass writes

    def parameter(self, position: int, value: Value) -> T:
        """The counterpart of input `position`."""
        raise NotImplementedError

    def number(self, number: Number) -> Any:
        """The counterpart of a number that is an input."""
        raise NotImplementedError

    def constant(self, constant: Any) -> Any:
        """The counterpart of anything else that stands in an argument."""
        return constant

    def emit(self, node: Node, args: tuple[Any, ...]) -> Sequence[T | None]:
        """The counterparts of the node's outputs, given those of its arguments (in the order of the schema)."""
        raise NotImplementedError

    def build(self) -> Computation:
        """The finished program."""
        raise NotImplementedError

    # ---- what it inherits

    def lower(self, nodes: Iterable[Node] | None = None) -> LoweringContext[T]:
        """Make the parameters, emit the nodes (all, or those given, in order), and note the results."""
        for position, value in enumerate(self.graph.inputs):
            if value not in self.emitted:
                self.add_parameter(position, value)
        for node in self.graph.nodes if nodes is None else nodes:
            self.lower_node(node)
        if nodes is None:
            for position, value in enumerate(self.graph.outputs):
                self.add_result(value)
                replaced = self.graph.replaces[position]
                if replaced is not None:
                    self.set_alias(position, replaced)
        return self

    def lower_node(self, node: Node) -> None:
        """Emit one node, unless all its results are there already."""
        if all(value in self.emitted for value in node.results):
            return
        made = self.emit(node, tuple(self.argument(arg) for arg in node.args))
        if len(made) != len(node.outputs):
            raise BackendError(f"the lowering of {node_text(node)} made {len(made)} values, not {len(node.outputs)}")
        for value, counterpart in zip(node.outputs, made, strict=True):
            if value is not None:
                if counterpart is None:
                    raise BackendError(f"the lowering of {node_text(node)} made nothing for %{value.id}")
                self.emitted[value] = counterpart
        self.emitted_nodes += 1

    def argument(self, arg: Arg) -> Any:
        """The counterpart of an argument; tuples stay tuples."""
        return map_leaves(arg, self._leaf)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return self.emitted[leaf]
        if isinstance(leaf, Number):
            return self.number(leaf)
        return self.constant(leaf)

    def add_parameter(self, position: int, value: Value) -> T:
        made = self.parameter(position, value)
        self.emitted[value] = made
        self.parameters.append(made)
        return made

    def add_result(self, value: Value) -> int:
        """Note a result; returns its position."""
        self.results.append(self.emitted[value])
        return len(self.results) - 1

    def set_alias(self, result: int, parameter: int) -> None:
        """Result `result` may be written into the buffer of parameter `parameter`."""
        self.aliases[result] = parameter


def post_order(graph: Graph, wanted: Sequence[Value]) -> list[Node]:
    """The nodes that some values need, in an order in which they can run."""
    needed = set(wanted)
    kept = []
    for node in reversed(graph.nodes):
        if any(value in needed for value in node.results):
            needed.update(node.operands)
            kept.append(node)
    return kept[::-1]


def with_all_inputs(graph: Graph, device: torch.device, run: Run) -> Run:
    """A program that has to have a tensor for every input: those that no node reads, and that are None, become tensors
    of whatever contents."""
    missing = [(k, graph.inputs[k].type) for k in unread(graph)]

    def run_with_all(inputs: list[Any], numbers: list[PythonNumber]) -> Sequence[Any]:
        for k, type_ in missing:
            if inputs[k] is None:
                inputs[k] = torch.empty_strided(type_.sizes, type_.strides, dtype=type_.dtype, device=device)
        return run(inputs, numbers)

    return run_with_all if missing else run
