"""One graph for many sizes: graphs of the same step at several sizes, put together.

Passes work with plain integers, and so they stay simple. A step whose sizes vary goes through them several times, with
sizes that were chosen to have nothing in common with each other or with anything else; what comes out has to be the
same but for integers, and each of those a polynomial of the sizes (ir/sizes.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tarry.errors import IRError
from tarry.ir.graph import Graph, Node, Value
from tarry.ir.layout import TensorType
from tarry.ir.sizes import Polynomial, Size, Symbols, fit


def generalize(graphs: Sequence[Graph], examples: Sequence[Symbols], known: Sequence[Polynomial]) -> Graph:
    """The graph that each of the given ones is at its values of the symbols. Its own integers are those of the first.

    Raises IRError if there is no such graph: a pass has treated one size unlike another.
    """
    return _Generalizer(graphs, examples, known).run()


class _Generalizer:
    def __init__(self, graphs: Sequence[Graph], examples: Sequence[Symbols], known: Sequence[Polynomial]) -> None:
        self.graphs = graphs
        self.examples = examples
        self.known = known
        self.values: dict[int, Value] = {}
        self.fitted: dict[tuple[int, ...], int] = {}

    def run(self) -> Graph:
        first = self.graphs[0]
        self.same("the number of nodes", [len(graph.nodes) for graph in self.graphs])
        self.same("the outputs", [[value.id for value in graph.outputs] for graph in self.graphs])
        self.same("the updates", [graph.replaces for graph in self.graphs])
        inputs = [self.value(column) for column in zip(*(graph.inputs for graph in self.graphs), strict=True)]
        nodes = [self.node(column) for column in zip(*(graph.nodes for graph in self.graphs), strict=True)]
        outputs = tuple(self.values[value.id] for value in first.outputs)
        return Graph(tuple(inputs), first.numbers, tuple(nodes), outputs, first.replaces)

    def same(self, what: str, found: Sequence[Any]) -> None:
        if any(item != found[0] for item in found):
            raise IRError(f"{what} of this step depend on its sizes")

    def value(self, column: Sequence[Value]) -> Value:
        self.same("the values", [value.id for value in column])
        self.same("the dtypes", [value.type.dtype for value in column])
        sizes = self.arg([value.type.sizes for value in column])
        strides = self.arg([value.type.strides for value in column])
        made = Value(column[0].id, TensorType(column[0].type.dtype, sizes, strides))
        self.values[made.id] = made
        return made

    def node(self, column: Sequence[Node]) -> Node:
        first = column[0]
        self.same("the operators", [(node.op, node.region, node.kept, node.seed) for node in column])
        args = self.arg([node.args for node in column])
        self.same("the results", [[value is None for value in node.outputs] for node in column])
        outputs = tuple(
            None if values[0] is None else self.value(values)
            for values in zip(*(node.outputs for node in column), strict=True)
        )
        return Node(first.op, args, outputs, first.site, first.region, first.kept, first.seed)

    def arg(self, column: Sequence[Any]) -> Any:
        first = column[0]
        if isinstance(first, tuple):
            if any(not isinstance(item, tuple) or len(item) != len(first) for item in column):
                raise IRError("the lengths of arguments of this step depend on its sizes")
            return tuple([self.arg(items) for items in zip(*column, strict=True)])
        if type(first) is int and all(type(item) is int for item in column):
            return self.integer(tuple(column))
        if isinstance(first, Value):
            self.same("the operands", [getattr(item, "id", None) for item in column])
            return self.values[first.id]
        # By text, too: a NaN is not equal to itself.
        if any(type(item) is not type(first) or (item != first and repr(item) != repr(first)) for item in column):
            raise IRError("an argument of this step that is no integer depends on its sizes")
        return first

    def integer(self, column: tuple[int, ...]) -> int:
        if column not in self.fitted:
            found = fit(column, self.examples, self.known)
            if found is None:
                raise IRError(f"an integer of this step is {', '.join(map(str, column))} at several sizes, by no rule")
            self.fitted[column] = column[0] if found.is_constant else Size(column[0], found)
        return self.fitted[column]
