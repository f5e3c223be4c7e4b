"""Nodes with a class per operator: what `python -m tarry.codegen` generates derives from `TypedNode`.

A graph holds plain nodes: an operator's name and its arguments in order. Code that cares about particular operators
reads better with fields that have names and types:

    match nodes.typed(node):
        case nodes.AddTensor(other=Number() as number, alpha=1):
            ...

A typed node is a view of a plain one, or stands for one that is yet to be made (`append`). It never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import torch

from tarry.errors import IRError
from tarry.ir.graph import Arg, GraphBuilder, Here, Node, Number, Site, Value, leaves, map_leaves, typed
from tarry.ir.infer import output_types
from tarry.ir.layout import TensorType

__all__ = [
    "Device",
    "Float",
    "Generator",
    "Lowered",
    "Lowering",
    "Node",
    "Scalar",
    "Shapes",
    "Tensor",
    "TensorType",
    "TypedNode",
    "reads",
]

# What a field of each type of a schema holds. A number may be an input of the graph wherever a schema has one.
Tensor: TypeAlias = Value | Number | int | float | complex
Scalar: TypeAlias = Number | int | float | complex
Float: TypeAlias = Number | int | float
Device: TypeAlias = torch.device | Here
Generator: TypeAlias = Number
"""A generator is the seed that a random operator draws from."""
Shapes: TypeAlias = Sequence[TensorType | None]
Lowered: TypeAlias = Sequence[Any]
"""What a backend has for the fresh results of a node."""


class Lowering(Protocol):
    """What a node lowers itself with: see tarry.LoweringContext."""

    def argument(self, arg: Arg) -> Any:
        """The counterpart of an argument."""
        ...

    def builtin(self, op: str, args: tuple[Any, ...]) -> Lowered:
        """The counterparts of the fresh results of an operator, given those of all its arguments, in their order."""
        ...


class TypedNode:
    """The base of generated node classes. A subclass has a slot for each argument of its operator."""

    __slots__ = ("_node", "_shapes")

    op: ClassVar[str] = ""
    """The operator, "aten::add.Tensor"."""
    opkind: ClassVar[str] = ""
    """What a non-native node is to the author's C++, if the YAML says so."""
    fields: ClassVar[tuple[str, ...]] = ()
    """The arguments, in the order of the schema; a Python keyword has an underscore behind it."""
    operands: ClassVar[tuple[str, ...]] = ()
    """Those of them that are values of the graph: tensors, and numbers that may become inputs."""
    attributes: ClassVar[tuple[str, ...]] = ()
    """The others."""

    _node: Node | None
    _shapes: Shapes | None

    def __init__(self, args: Sequence[Arg], shapes: Shapes | None = None) -> None:
        for name, arg in zip(self.fields, args, strict=True):
            object.__setattr__(self, name, arg)
        object.__setattr__(self, "_node", None)
        object.__setattr__(self, "_shapes", shapes)

    @classmethod
    def from_node(cls, node: Node) -> Self:
        """The typed view of a node of this operator."""
        if node.op != cls.op:
            raise IRError(f"{cls.__name__}.from_node: expected a node of {cls.op}, got one of {node.op}")
        made = cls.__new__(cls)
        TypedNode.__init__(made, node.args)
        object.__setattr__(made, "_node", node)
        return made

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name}: nodes do not change; make another one")

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments in the order of the schema."""
        return tuple(getattr(self, name) for name in self.fields)

    @property
    def node(self) -> Node | None:
        """The node that this one is a view of."""
        return self._node

    def identity(self) -> tuple[Any, ...]:
        """The operator and its attributes: what a node is, apart from what it reads."""
        return (self.op, *(typed(getattr(self, name)) for name in self.attributes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TypedNode) and self.op == other.op and typed(self.args) == typed(other.args)

    def __hash__(self) -> int:
        return hash((self.op, typed(self.args)))

    def has_args(self, *args: Arg) -> bool:
        """Whether these are its arguments, types of numbers included."""
        return typed(self.args) == typed(args)

    def shapes(self) -> Shapes:
        """The types of the outputs: those that were given, or those that PyTorch's meta kernel finds."""
        if self._shapes is None:
            found = self.compute_shapes() if self._node is None else [_type(value) for value in self._node.outputs]
            object.__setattr__(self, "_shapes", found)
        assert self._shapes is not None
        return self._shapes

    def compute_shapes(self) -> Shapes:
        """Find the types of the outputs; a node without a meta kernel overrides it."""
        return output_types(self.op, self.args)

    def argument_types(self) -> tuple[Any, ...]:
        """The arguments with the type of each value in its place: what a shape function is given."""
        return tuple(map_leaves(arg, lambda leaf: leaf.type if isinstance(leaf, Value) else leaf) for arg in self.args)

    def append(self, builder: GraphBuilder, *, site: Site | None = None) -> tuple[Value | None, ...]:
        """Append the node to a graph; returns its outputs."""
        return builder.node(self.op, self.args, self.shapes(), site=site)

    def lower_with(self, context: Lowering) -> Lowered:
        """The node in terms of a backend. Generated with --gen-ts-lowerings; else a backend goes by the operator."""
        raise NotImplementedError(f"{type(self).__name__}.lower_with: subclass it and write the lowering of {self.op}")

    def __str__(self) -> str:
        shown = ", ".join(f"{name.removesuffix('_')}={_text(getattr(self, name))}" for name in self.fields)
        return f"{self.op}({shown})"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


def _type(value: Value | None) -> TensorType | None:
    return None if value is None else value.type


def _text(arg: Arg) -> str:
    if isinstance(arg, tuple):
        return f"[{', '.join(_text(item) for item in arg)}]"
    if isinstance(arg, Value):
        return f"%{arg.id}"
    if isinstance(arg, Number):
        return f"#{arg.index}"
    return "here" if isinstance(arg, Here) else repr(arg)


def reads(node: TypedNode) -> tuple[Value, ...]:
    """The values that a node reads, in order of appearance, with repeats."""
    return tuple(leaf for leaf in leaves(node.args) if isinstance(leaf, Value))
