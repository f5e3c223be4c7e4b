"""Shape functions that the author owes: the signature of each, and a module of stubs."""

from __future__ import annotations

from collections.abc import Sequence

from tarry.codegen.emit.python import (
    SHAPE_TYPES,
    docstring,
    header,
    identifier,
    needs_torch,
    parameters,
    returned,
    signature,
)
from tarry.codegen.model import LazySchema, Shape
from tarry.codegen.schema import function_name


def shape_name(schema: LazySchema) -> str:
    return f"compute_shape_{function_name(schema.name)}"


def shape_signature(schema: LazySchema) -> str:
    """The line to paste: from the types of tensors, and everything else as it is, to the types of the results."""
    return signature(f"def {shape_name(schema)}", parameters(schema.arguments, SHAPE_TYPES), "t.Shapes")


def has_shape_function(schema: LazySchema) -> bool:
    """Whether a non-native node asks for a shape function; PyTorch knows nothing of it."""
    return schema.properties.shape in (Shape.COMPUTE, Shape.CACHE)


def emit_shapes(owed: Sequence[LazySchema], own: Sequence[LazySchema], command: str) -> str:
    """The module of stubs. An ATen operator's stub asks PyTorch's meta kernel, which many have that torchgen does not
    know of; where there is none, and for nodes of the author's own, it says what to write."""
    schemas = [*owed, *own]
    summary = (
        "Shape functions of operators that torchgen knows no meta kernel of. To write them yourself, copy this file "
        "and pass it with --shape-inference-path."
    )
    lines = [
        header(command, summary, schemas),
        "from __future__ import annotations",
        "",
        *(["import torch", ""] if needs_torch(schemas) else []),
        "from tarry.ir import typed as t",
        *(["from tarry.ir.infer import infer_types"] if owed else []),
        "",
        "",
        "\n\n".join(_stub(schema, schema.is_native) for schema in schemas),
    ]
    return "\n".join(lines)


def _stub(schema: LazySchema, is_native: bool) -> str:
    names = [identifier(argument.name) for argument in schema.arguments]
    if is_native:
        body = returned("infer_types", names, "    ", first=[f'"{schema.qualified_name}"'])
    else:
        body = f'    raise NotImplementedError("write {shape_name(schema)}")'
    return f"{shape_signature(schema)}\n{docstring(schema.text)}\n{body}\n"


def emit_shape_imports(schemas: Sequence[LazySchema], module: str, command: str) -> str:
    """The module that takes the author's shape functions from where they are."""
    names = sorted(shape_name(schema) for schema in schemas)
    listed = "".join(f"    {name},\n" for name in names)
    exported = "".join(f'    "{name}",\n' for name in names)
    return (
        f"{header(command, 'Shape functions.')}\n"
        f"from __future__ import annotations\n\nfrom {module} import (\n{listed})\n\n__all__ = [\n{exported}]\n"
    )
