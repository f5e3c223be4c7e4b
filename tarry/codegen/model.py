"""What a backend's YAML says, as data: frozen, typed, printable. Readers make it, emitters read it.

Nothing here knows the syntax of YAML, of C++ or of Python. The names are those of PyTorch's lazy tensor generator
where it has one: an *operand* is an argument that is a value of the graph (a tensor, or a number that became one), an
*attribute* is any other argument, and belongs to the identity of the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a file; line and column count from 1."""

    path: str
    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where it is, what is wrong, and what to write instead. A warning does not keep files from being
    made."""

    position: Position
    message: str
    hint: str = ""
    is_warning: bool = False

    def __str__(self) -> str:
        hint = "".join(f"\n    {line}" for line in self.hint.splitlines())
        return f"{self.position}: {'warning' if self.is_warning else 'error'}: {self.message}{hint}"


class Base(StrEnum):
    """What an argument is made of, spelled as in schemas."""

    TENSOR = "Tensor"
    SCALAR = "Scalar"
    SYMINT = "SymInt"
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    STR = "str"
    DTYPE = "ScalarType"
    LAYOUT = "Layout"
    DEVICE = "Device"
    MEMORY_FORMAT = "MemoryFormat"
    GENERATOR = "Generator"


@dataclass(frozen=True, slots=True)
class LazyType:
    """A type of an argument or a return: `Tensor`, `Tensor?`, `int[2]`, `Tensor?[]`, `int[]?`."""

    base: Base
    is_list: bool = False
    is_optional: bool = False
    has_optional_elements: bool = False
    size: int | None = None

    def __str__(self) -> str:
        element = f"{self.base}{'?' if self.has_optional_elements else ''}"
        size = "" if self.size is None else str(self.size)
        return f"{element}{f'[{size}]' if self.is_list else ''}{'?' if self.is_optional else ''}"


@dataclass(frozen=True, slots=True)
class LazyArgument:
    """One argument of an operator, as a field of its node.

    `is_operand`: it is a value of the graph. A Scalar is one (a *wrapped scalar*), unless the node treats scalars as
    constants; a SymInt is one if the backend takes symbolic sizes for the operator; a list of SymInts never is.
    `default` is the schema's text of it, None where there is none.
    """

    name: str
    type: LazyType
    is_operand: bool
    keyword_only: bool = False
    default: str | None = None
    is_written: bool = False
    is_out: bool = False

    @property
    def is_generator(self) -> bool:
        return self.type.base is Base.GENERATOR

    def __str__(self) -> str:
        default = "" if self.default is None else f"={self.default}"
        return f"{self.type} {self.name}{default}: {'operand' if self.is_operand else 'attribute'}"


class Extent(StrEnum):
    """How much of a method is generated."""

    FULL = "full"
    DECLARED = "declared"  # the author writes it
    NONE = "none"


class Shape(StrEnum):
    """When the types of a node's outputs are found."""

    PRECOMPUTE = "precompute"  # the maker of the node passes them
    COMPUTE = "compute"  # when the node is made
    CACHE = "cache"  # when they are first asked for
    NONE = "none"


PROPERTY_GROUPS: tuple[tuple[str, ...], ...] = (
    ("ShapePrecompute", "ShapeCompute", "ShapeCache"),
    ("Lower", "LowerDeclOnly"),
    ("CanBeReused", "CanBeReusedDeclOnly"),
    ("CreateFn", "CreateFnDeclOnly"),
    ("TreatScalarsAsConstants",),
)
"""The names of properties in a YAML; a node has at most one of each group."""


@dataclass(frozen=True, slots=True)
class NodeProperties:
    """How a node behaves."""

    shape: Shape = Shape.PRECOMPUTE
    lower: Extent = Extent.FULL
    reuse: Extent = Extent.FULL
    create: Extent = Extent.NONE
    scalars_are_constants: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """As a YAML spells them."""
        shapes = {
            Shape.PRECOMPUTE: "ShapePrecompute", Shape.COMPUTE: "ShapeCompute", Shape.CACHE: "ShapeCache"
        }  # fmt: skip
        found = [shapes[self.shape]] if self.shape in shapes else []
        for stem, extent in (("Lower", self.lower), ("CanBeReused", self.reuse), ("CreateFn", self.create)):
            if extent is not Extent.NONE:
                found.append(stem if extent is Extent.FULL else f"{stem}DeclOnly")
        if self.scalars_are_constants:
            found.append("TreatScalarsAsConstants")
        return tuple(found)


NATIVE_PROPERTIES = NodeProperties()
NON_NATIVE_PROPERTIES = NodeProperties(Shape.CACHE, Extent.DECLARED)


class Variant(StrEnum):
    """Which form of an operator a schema is."""

    FUNCTIONAL = "functional"
    INPLACE = "inplace"
    OUT = "out"
    MUTABLE = "mutable"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class LazySchema:
    """An operator as a lazy graph sees it: the fields of its node class, in order.

    `name` is the operator's without a namespace ("add.Tensor"); `class_name` is that of its node; `text` is the schema
    as PyTorch writes it. `takes_symints`: the backend takes symbolic sizes for it.
    """

    name: str
    class_name: str
    text: str
    arguments: tuple[LazyArgument, ...]
    returns: tuple[LazyType, ...]
    variant: Variant = Variant.FUNCTIONAL
    properties: NodeProperties = NATIVE_PROPERTIES
    takes_symints: bool = False
    namespace: str = "aten"
    opkind: str | None = None
    tags: frozenset[str] = frozenset()

    @property
    def operands(self) -> tuple[LazyArgument, ...]:
        return tuple(argument for argument in self.arguments if argument.is_operand)

    @property
    def attributes(self) -> tuple[LazyArgument, ...]:
        return tuple(argument for argument in self.arguments if not argument.is_operand)

    @property
    def positional(self) -> tuple[LazyArgument, ...]:
        return tuple(argument for argument in self.arguments if not argument.keyword_only)

    @property
    def keyword_only(self) -> tuple[LazyArgument, ...]:
        return tuple(argument for argument in self.arguments if argument.keyword_only)

    @property
    def generator(self) -> LazyArgument | None:
        """The argument that is a generator, if there is one."""
        return next((argument for argument in self.arguments if argument.is_generator), None)

    @property
    def is_native(self) -> bool:
        return self.namespace == "aten"

    @property
    def qualified_name(self) -> str:
        """With the namespace: "aten::add.Tensor". Nodes that are no ATen operators have the backend's."""
        return f"{self.namespace}::{self.name}"

    def __str__(self) -> str:
        fields = "".join(f"\n  {argument}" for argument in self.arguments)
        return f"{self.class_name}: {self.text}{fields}"


class Section(StrEnum):
    """The lists of operators in a YAML."""

    FULL_CODEGEN = "full_codegen"  # node, shape and kernel are generated
    IR_GEN = "ir_gen"  # only the node
    SUPPORTED = "supported"  # the author writes the kernel
    AUTOGRAD = "autograd"  # the author writes forward and backward
    SYMINT = "symint"  # takes symbolic sizes


@dataclass(frozen=True, slots=True)
class BackendOperator:
    """An operator that a YAML lists, with what it says about it.

    `kernel` is the name that PyTorch's generators give to its C++ kernel (overloads share it); `function` is the name
    of the Python function, which no other operator has. `functional` is the operator that a graph has instead of an
    in-place or out variant: graphs are pure.
    """

    name: str
    section: Section
    kernel: str
    function: str
    schema: LazySchema
    position: Position
    functional: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ShapeFunction:
    """A function that the author owes: from types of operands and attributes to types of results.

    `name` is the Python function's; `cpp_name` is what PyTorch's generator calls the C++ function, and
    `cpp_declaration` the line that it looks for in a header.
    """

    operator: str
    name: str
    cpp_name: str
    cpp_declaration: str
    schema: LazySchema


@dataclass(frozen=True, slots=True)
class Backend:
    """A whole YAML. `nodes` are those of ATen operators, `non_native` those that only graphs have. `symint` are names
    of operators that other lists have."""

    source: Path
    name: str
    cpp_namespace: str
    class_name: str
    operators: tuple[BackendOperator, ...]
    nodes: tuple[LazySchema, ...]
    non_native: tuple[LazySchema, ...]
    shape_functions: tuple[ShapeFunction, ...]
    autograd_key: str | None = None
    extra_headers: str | None = None
    use_out_as_primary: bool = False
    device_guard: bool = False
    symint: tuple[str, ...] = ()
    non_native_positions: Mapping[str, Position] = field(default_factory=dict, hash=False)

    def of(self, *sections: Section) -> Iterator[BackendOperator]:
        """The operators of some sections, in the order of the YAML."""
        return (operator for operator in self.operators if operator.section in sections)

    @property
    def all_nodes(self) -> tuple[LazySchema, ...]:
        return self.nodes + self.non_native

    def __str__(self) -> str:
        counts = {section: sum(1 for _ in self.of(section)) for section in Section}
        counts[Section.SYMINT] = len(self.symint)
        listed = ", ".join(f"{count} {section}" for section, count in counts.items())
        return f"backend {self.name} of {self.source}: {len(self.all_nodes)} nodes; {listed}"
