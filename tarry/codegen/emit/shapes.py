"""Shape functions that the author owes: the signature of each, and a module of stubs."""

from __future__ import annotations

from collections.abc import Sequence

from tarry.codegen.emit.python import SHAPE_TYPES, call, docstring, header, identifier, parameters, signature
from tarry.codegen.model import Base, LazySchema, Shape
from tarry.codegen.schema import function_name


def shape_name(schema: LazySchema) -> str:
    return f"compute_shape_{function_name(schema.name)}"


def shape_signature(schema: LazySchema) -> str:
    """The line to paste: from the types of tensors, and everything else as it is, to the types of the results."""
    return signature(f"def {shape_name(schema)}", parameters(schema.arguments, SHAPE_TYPES), "Shapes")


def has_shape_function(schema: LazySchema) -> bool:
    """Whether a non-native node asks for a shape function; PyTorch knows nothing of it."""
    return schema.properties.shape in (Shape.COMPUTE, Shape.CACHE)


def emit_shapes(owed: Sequence[LazySchema], own: Sequence[LazySchema], command: str) -> str:
    """The module of stubs. An ATen operator's stub asks PyTorch's meta kernel, which many have that torchgen does not
    know of; where there is none, and for nodes of the author's own, it says what to write."""
    schemas = [*owed, *own]
    bases = {argument.type.base for schema in schemas for argument in schema.arguments}
    names = sorted(
        name
        for name, base in {
            "Device": Base.DEVICE, "Float": Base.FLOAT, "Generator": Base.GENERATOR, "Scalar": Base.SCALAR
        }.items()
        if base in bases
    )  # fmt: skip
    needs_torch = bases & {Base.DTYPE, Base.LAYOUT, Base.MEMORY_FORMAT}
    lines = [
        header(
            command,
            '"""Shape functions that PyTorch\'s generator has no meta kernel for. To write them yourself, copy this file and\n'
            'pass it with --shape-inference-path.\n"""',
            ["A002  (arguments have the names of the schema)"],
        ),
        "from __future__ import annotations",
        "",
        *(["import torch", ""] if needs_torch else []),
        *(["from tarry.ir.infer import infer_types"] if owed else []),
        *(["from tarry.ir.layout import TensorType"] if Base.TENSOR in bases else []),
        f"from tarry.ir.typed import {', '.join([*names, 'Shapes'])}",
        "",
        "",
        "\n\n".join(_stub(schema, schema in owed) for schema in schemas),
    ]
    return "\n".join(lines)


def _stub(schema: LazySchema, is_native: bool) -> str:
    names = [identifier(argument.name) for argument in schema.arguments]
    if is_native:
        listed = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
        body = call("return infer_types", [f'"{schema.qualified_name}"', listed], "    ")
        if max(map(len, body.splitlines())) > 120:
            body = "    args = (\n" + "".join(f"        {name},\n" for name in names) + "    )\n"
            body += f'    return infer_types("{schema.qualified_name}", args)'
    else:
        body = f'    raise NotImplementedError("write {shape_name(schema)}")'
    return f"{shape_signature(schema)}\n{docstring(schema.text)}\n{body}\n"
