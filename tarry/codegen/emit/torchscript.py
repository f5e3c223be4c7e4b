"""TorchScript lowerings as functions: an operator's arguments to a node of a torch._C.Graph."""

from __future__ import annotations

from collections.abc import Sequence

from tarry.codegen.emit.python import LINE_LENGTH, call, docstring, header, identifier, signature, table
from tarry.codegen.model import Base, LazySchema, LazyType
from tarry.codegen.schema import function_name

# TorchScript has no types of their own for these: they are ints.
_INTS = frozenset({Base.SYMINT, Base.DTYPE, Base.LAYOUT, Base.MEMORY_FORMAT})
_NAMES = {
    Base.TENSOR: "TENSOR",
    Base.SCALAR: "NUMBER",
    Base.INT: "INT",
    Base.FLOAT: "FLOAT",
    Base.BOOL: "BOOL",
    Base.STR: "STRING",
    Base.DEVICE: "DEVICE",
    Base.GENERATOR: "GENERATOR",
}


def jit_type(type_: LazyType) -> str:
    """A type of a schema, by its name in tarry.backends.torchscript.types."""
    name = "INT" if type_.base in _INTS else _NAMES[type_.base]
    if type_.is_list:
        name = f"{'OPTIONAL_' if type_.has_optional_elements else ''}{name}_LIST"
    return f"OPTIONAL_{name}" if type_.is_optional else name


def emit_lowerings(schemas: Sequence[LazySchema], command: str) -> str:
    """A module of lowerings, with a table from operators to functions."""
    rows = [(schema.qualified_name, function_name(schema.name)) for schema in schemas]
    lines = [
        header(command, "TorchScript lowerings of operators.", schemas, [name for _, name in rows]),
        "from __future__ import annotations",
        "",
        "from collections.abc import Callable",
        "from typing import Any",
        "",
        "from tarry.backends.torchscript import types as jit_types",
        "from tarry.backends.torchscript.jit import JitBuilder",
        "",
        "",
        "\n\n".join(_lowering(schema) for schema in schemas),
        "",
        table("LOWERINGS", "dict[str, Callable[..., Any]]", rows, "The lowering of each operator."),
    ]
    return "\n".join(lines)


def _lowering(schema: LazySchema) -> str:
    names = [identifier(argument.name) for argument in schema.arguments]
    head = signature(
        f"def {function_name(schema.name)}", ["builder: JitBuilder", *(f"{name}: Any" for name in names)], "Any"
    )
    operands = [
        f"builder.operand({name}, jit_types.{jit_type(argument.type)})"
        for name, argument in zip(names, schema.arguments, strict=True)
    ]
    returns = [f"jit_types.{jit_type(ret)}" for ret in schema.returns]
    kind = schema.qualified_name.partition(".")[0]
    body = call("return builder.node", [f'"{kind}"', _list(operands), _list(returns)], "    ")
    if max(map(len, body.splitlines())) > LINE_LENGTH:
        body = f"{_assigned('operands', operands)}\n{_assigned('returns', returns)}\n"
        body += f'    return builder.node("{kind}", operands, returns)'
    return f"{head}\n{docstring(schema.text)}\n{body}\n"


def _list(items: Sequence[str]) -> str:
    return f"[{', '.join(items)}]"


def _assigned(name: str, items: Sequence[str]) -> str:
    """A list with a name, on as many lines as it takes."""
    one = f"    {name} = {_list(items)}"
    if len(one) <= LINE_LENGTH:
        return one
    listed = "".join(f"        {item},\n" for item in items)
    return f"    {name} = [\n{listed}    ]"
