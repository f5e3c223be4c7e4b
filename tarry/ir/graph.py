"""The graph: values, numbers, nodes. Immutable, typed, compared by structure.

A graph is one step of a user's program as a pure function: from the contents of some buffers (`inputs`) and some Python
numbers (`numbers`) to new contents of buffers (`outputs`). Nodes are in an order in which they can run. Nothing in a
graph is ever changed in place: a pass builds another graph (see GraphBuilder), so every stage stays printable.

Types are a demand, not a remark: a value has exactly the strides of its type. An executor whose kernel returns other
strides must copy (strides of dimensions of size 1 are free, see TensorType.matches).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from tarry.ir.layout import TensorType

NumberKind: TypeAlias = Literal["number", "wrapped", "seed"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in the graph: an input or one output of a node. `id` is unique in its graph."""

    id: int
    type: TensorType

    def __hash__(self) -> int:  # cheap: values are keys of most tables that passes keep
        return self.id


@dataclass(frozen=True, slots=True)
class Number:
    """A Python number that is an input of the graph, so that a new learning rate or seed is no new graph.

    `value` is what it was when the graph was recorded. It takes no part in comparison: two graphs that differ in it
    only are the same program. Its dtype (int64, float64, bool or complex128) does take part, for it decides promotion.
    Kinds: 'number' came in a Scalar or float argument, 'wrapped' stood in for a Tensor, 'seed' seeds a generator.
    """

    index: int
    kind: NumberKind
    dtype: torch.dtype
    value: int | float | complex = field(compare=False)


@dataclass(frozen=True, slots=True)
class Here:
    """The device the graph runs on, whichever real device that turns out to be. There is one: HERE."""


HERE = Here()


@dataclass(frozen=True, slots=True)
class Site:
    """The line of the user's program that a node comes from, and the module in which it ran: model.blocks.3.attn."""

    file: str
    line: int
    module: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.module}" if self.module else "")


Constant: TypeAlias = (
    bool | int | float | complex | str | torch.dtype | torch.layout | torch.memory_format | torch.device | Here | None
)
Arg: TypeAlias = "Value | Number | Constant | tuple[Arg, ...]"


def typed(arg: Any) -> Any:
    """A hashable stand-in for an argument that tells 1, 1.0 and True apart, -0.0 from 0.0, and makes NaN equal NaN."""
    if isinstance(arg, tuple):
        return tuple(typed(item) for item in arg)
    if isinstance(arg, float | complex):
        return (type(arg), repr(arg))
    if isinstance(arg, bool | int):
        return (type(arg), arg)
    return arg


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operator call.

    `args` holds every argument of the operator's schema, in its order. An output is None where the operator returns no
    tensor there (the gradients that convolution_backward's mask turns off).

    An operator that writes to its arguments (`aten::add_.Tensor`) is pure here all the same: its outputs are its fresh
    returns, then the new contents of every argument it writes, in schema order, lists flattened, absent ones left out.
    `kept` says that functionalize found no pure operator for it, so a backend has to run it on copies.

    `region` is 0, or the number of the activation-checkpoint recomputation that the node belongs to: merging a node
    with one of another region would keep alive what recomputation is there to free.

    `seed` is what a random operator draws from that has no generator among its arguments (`aten::native_dropout`): the
    generator of the device it runs on, set to that seed for the time of the call.
    """

    op: str
    args: tuple[Arg, ...]
    outputs: tuple[Value | None, ...]
    site: Site | None = None
    region: int = 0
    kept: bool = False
    seed: Number | None = None

    def _key(self) -> tuple[Any, ...]:
        return (self.op, typed(self.args), self.outputs, self.site, self.region, self.kept, self.seed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def drawn_from(self) -> Number | None:
        """The seed that the operator draws from: the node's own, or that among its arguments."""
        if self.seed is not None:
            return self.seed
        return next((arg for arg in self.args if isinstance(arg, Number) and arg.kind == "seed"), None)

    @property
    def results(self) -> tuple[Value, ...]:
        """The outputs that exist."""
        return tuple(value for value in self.outputs if value is not None)

    @property
    def operands(self) -> tuple[Value, ...]:
        """The values read, in order of appearance, with repeats."""
        return tuple(leaf for leaf in leaves(self.args) if isinstance(leaf, Value))


@dataclass(frozen=True, slots=True)
class Graph:
    """`replaces[k]` is the index of the input whose storage output k takes over, or None: an in-place update, for which
    a backend may write into that input's buffer once nothing reads it any more."""

    inputs: tuple[Value, ...]
    numbers: tuple[Number, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    replaces: tuple[int | None, ...]


def leaves(arg: Arg) -> Iterator[Any]:
    """Everything in an argument that is not a tuple, depth first."""
    if isinstance(arg, tuple):
        for item in arg:
            yield from leaves(item)
    else:
        yield arg


def map_leaves(arg: Arg, change: Callable[[Any], Any]) -> Any:
    """The argument with every leaf replaced by `change(leaf)`."""
    if isinstance(arg, tuple):
        return tuple([map_leaves(item, change) for item in arg])
    return change(arg)


def producers(graph: Graph) -> dict[Value, Node]:
    """The node that makes each value; inputs have none."""
    return {value: node for node in graph.nodes for value in node.results}


def unread(graph: Graph) -> list[int]:
    """The positions of inputs that no node reads, and that are no outputs."""
    read = {value for node in graph.nodes for value in node.operands}.union(graph.outputs)
    return [k for k, value in enumerate(graph.inputs) if value not in read]


def users(graph: Graph) -> dict[Value, list[Node]]:
    """The nodes that read each value, in order, each once. Being an output of the graph is not a use."""
    found: dict[Value, list[Node]] = {value: [] for value in graph.inputs}
    for node in graph.nodes:
        for value in node.results:
            found.setdefault(value, [])
        for value in dict.fromkeys(node.operands):
            found.setdefault(value, []).append(node)
    return found


class GraphBuilder:
    """Makes a graph front to back, numbering values in order of definition; equal programs so get equal graphs.

    Given a graph, it starts with that graph's inputs and numbers and keeps a map from old values to new ones, which is
    all a rewriting pass needs: `copy` what stays, `node` + `replace` what changes, `finish`.
    """

    def __init__(self, source: Graph | None = None) -> None:
        self._source = source
        self._inputs: list[Value] = []
        self._numbers: list[Number] = []
        self._nodes: list[Node] = []
        self._next = 0
        self._map: dict[int, Value] = {}
        if source is not None:
            self._numbers.extend(source.numbers)
            for value in source.inputs:
                self._map[value.id] = self.input(value.type)

    def _value(self, type_: TensorType) -> Value:
        value = Value(self._next, type_)
        self._next += 1
        return value

    def input(self, type_: TensorType) -> Value:
        if self._nodes:
            raise ValueError("GraphBuilder.input: inputs come before all nodes")
        value = self._value(type_)
        self._inputs.append(value)
        return value

    def number(self, kind: NumberKind, dtype: torch.dtype, value: int | float | complex) -> Number:
        number = Number(len(self._numbers), kind, dtype, value)
        self._numbers.append(number)
        return number

    def node(
        self,
        op: str,
        args: Sequence[Arg],
        types: Iterable[TensorType | None],
        *,
        site: Site | None = None,
        region: int = 0,
        kept: bool = False,
        seed: Number | None = None,
    ) -> tuple[Value | None, ...]:
        """Append a node whose arguments are values of *this* graph; returns its outputs."""
        outputs = tuple([None if type_ is None else self._value(type_) for type_ in types])
        self._nodes.append(Node(op, tuple(args), outputs, site, region, kept, seed))
        return outputs

    def one(self, op: str, args: Sequence[Arg], type_: TensorType, like: Node | None = None) -> Value:
        """Append a node with one output, with the site and region of the node it stands for."""
        site, region = (like.site, like.region) if like is not None else (None, 0)
        (value,) = self.node(op, args, (type_,), site=site, region=region)
        assert value is not None
        return value

    def resolve(self, arg: Arg) -> Any:
        """An argument of the source graph in terms of this one."""
        return map_leaves(arg, lambda leaf: self._map[leaf.id] if isinstance(leaf, Value) else leaf)

    def replace(self, old: Value, new: Value) -> None:
        """From now on `old` of the source graph is `new` here."""
        self._map[old.id] = new

    def copy(self, node: Node, **changes: Any) -> tuple[Value | None, ...]:
        """Append a node of the source graph as it is, except for the fields given."""
        given = {"site": node.site, "region": node.region, "kept": node.kept, "seed": node.seed} | changes
        args = given.pop("args") if "args" in given else self.resolve(node.args)
        types = (None if value is None else value.type for value in node.outputs)
        outputs = self.node(node.op, args, types, **given)
        for old, new in zip(node.outputs, outputs, strict=True):
            if old is not None and new is not None:
                self._map[old.id] = new
        return outputs

    def finish(self, outputs: Sequence[Value] | None = None, replaces: Sequence[int | None] | None = None) -> Graph:
        """The graph. Without `outputs`, those of the source graph."""
        if outputs is None:
            assert self._source is not None, "GraphBuilder.finish: a graph built from nothing needs its outputs"
            outputs = [self._map[value.id] for value in self._source.outputs]
            replaces = self._source.replaces
        if replaces is None:
            replaces = [None] * len(outputs)
        return Graph(tuple(self._inputs), tuple(self._numbers), tuple(self._nodes), tuple(outputs), tuple(replaces))
