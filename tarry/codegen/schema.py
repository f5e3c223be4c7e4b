"""From torchgen's schemas to ours: which arguments of an operator are operands of its node, which are attributes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tarry.codegen.model import (
    NATIVE_PROPERTIES,
    Base,
    LazyArgument,
    LazySchema,
    LazyType,
    NodeProperties,
    ShapeFunction,
    Variant,
)

if TYPE_CHECKING:
    from torchgen.model import Argument, FunctionSchema, NativeFunction, Type


class Rejected(Exception):  # noqa: N818 - a schema that cannot be converted is an answer, not a fault
    """A schema has no node; the message says why."""


_BASES = {str(base): base for base in Base}


def lazy_type(type_: Type) -> LazyType:
    """A type of torchgen's model as ours."""
    from torchgen.model import BaseType, ListType, OptionalType

    if isinstance(type_, BaseType):
        base = _BASES.get(str(type_))
        if base is None:
            raise Rejected(f"has the type {type_}, which a node cannot hold")
        return LazyType(base)
    if isinstance(type_, OptionalType):
        inner = lazy_type(type_.elem)
        return replace(inner, is_optional=True)
    if isinstance(type_, ListType):
        inner = lazy_type(type_.elem)
        if inner.is_list:
            raise Rejected(f"has the type {type_}: a list of lists, which a node cannot hold")
        return LazyType(inner.base, True, False, inner.is_optional, type_.size)
    raise Rejected(f"has the type {type_}, which a node cannot hold")


def is_operand(type_: LazyType, properties: NodeProperties, takes_symints: bool) -> bool:
    """Whether an argument of a type is a value of the graph. The rule is that of PyTorch's lazy tensor generator."""
    if type_.base is Base.TENSOR:
        return True
    if type_.base is Base.SCALAR:
        return not properties.scalars_are_constants
    return type_.base is Base.SYMINT and takes_symints and not type_.is_list


def class_name(name: str) -> str:
    """The name of an operator's node class: "bitwise_and.Tensor" has BitwiseAndTensor."""
    base, _, overload = name.partition(".")
    words = f"{base}_{overload}".lower().split("_")
    return "".join(word.capitalize() for word in words)


def function_name(name: str) -> str:
    """The name of the Python function for an operator; no two operators share one."""
    return name.replace(".", "_").lower()


def lazy_schema(
    func: FunctionSchema,
    properties: NodeProperties = NATIVE_PROPERTIES,
    *,
    takes_symints: bool,
    namespace: str = "aten",
    opkind: str | None = None,
    tags: Iterable[str] = (),
) -> LazySchema:
    """The node's view of a schema. Raises Rejected where an argument is of a kind that nodes do not have."""
    arguments = func.arguments
    fields = [
        *(_argument(argument, properties, takes_symints) for argument in arguments.flat_positional),
        *(_argument(argument, properties, takes_symints, keyword=True) for argument in arguments.flat_kwarg_only),
        *(_argument(argument, properties, takes_symints, keyword=True, out=True) for argument in arguments.out),
    ]
    generators = [field.name for field in fields if field.is_generator]
    if len(generators) > 1:
        raise Rejected(f"has several generators ({', '.join(generators)}); a node has one seed")
    name = str(func.name)
    return LazySchema(
        name=name,
        class_name=class_name(name),
        text=str(func),
        arguments=tuple(fields),
        returns=tuple(_return_type(ret.type) for ret in func.returns),
        variant=Variant(func.kind().name),
        properties=properties,
        takes_symints=takes_symints,
        namespace=namespace,
        opkind=opkind,
        tags=frozenset(tags),
    )


def _argument(
    argument: Argument, properties: NodeProperties, takes_symints: bool, *, keyword: bool = False, out: bool = False
) -> LazyArgument:
    try:
        type_ = lazy_type(argument.type)
    except Rejected as error:
        raise Rejected(f"argument {argument.name!r} {error}") from None
    return LazyArgument(
        name=argument.name,
        type=type_,
        is_operand=is_operand(type_, properties, takes_symints),
        keyword_only=keyword,
        default=argument.default,
        is_written=argument.annotation is not None and argument.annotation.is_write,
        is_out=out,
    )


def _return_type(type_: Type) -> LazyType:
    """Only tensors matter among results; anything that graphs do not have is as good as a number."""
    try:
        return lazy_type(type_)
    except Rejected:
        return LazyType(Base.INT)


def native_schema(function: NativeFunction, *, takes_symints: bool = False) -> LazySchema:
    """The node's view of a native function."""
    return lazy_schema(function.func, takes_symints=takes_symints, tags=function.tags)


def kernel_name(function: NativeFunction, takes_symints: bool) -> str:
    """The name that PyTorch's generators give to a backend's kernel of an operator."""
    out = "_out" if function.func.is_out_fn() else ""
    return f"{function.func.name.name}{out}{'_symint' if takes_symints else ''}"


def owes_shape_function(function: NativeFunction) -> bool:
    """Whether PyTorch's generator finds no meta kernel for an operator: it is neither structured nor a copying view."""
    structured = function.structured or function.structured_delegate is not None
    return not structured and "view_copy" not in function.tags


def shape_function(function: NativeFunction, schema: LazySchema) -> ShapeFunction:
    """The shape function of an operator that owes one."""
    cpp_name = f"compute_shape_{kernel_name(function, schema.takes_symints)}"
    return ShapeFunction(
        operator=schema.name,
        name=f"compute_shape_{function_name(schema.name)}",
        cpp_name=cpp_name,
        cpp_declaration=_cpp_declaration(function, cpp_name, schema.takes_symints),
        schema=schema,
    )


def _cpp_declaration(function: NativeFunction, cpp_name: str, takes_symints: bool) -> str:
    from torchgen.api import dispatcher
    from torchgen.context import native_function_manager

    with native_function_manager(function):
        arguments: Any = dispatcher.arguments(function.func, symint=takes_symints)
        listed = ", ".join(argument.decl() for argument in arguments)
    return f"TORCH_API std::vector<torch::lazy::Shape> {cpp_name}({listed});"
