"""The model as JSON, for other programs: what --dry-run --json prints, and the recorder's table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tarry.codegen.emit.shapes import shape_signature
from tarry.codegen.model import Backend, LazySchema, Section
from tarry.codegen.op_table import OpEntry


def node_listing(schema: LazySchema) -> dict[str, Any]:
    return {
        "class": schema.class_name,
        "operator": schema.name,
        "schema": schema.text,
        "fields": [
            {
                "name": argument.name,
                "type": str(argument.type),
                "role": "operand" if argument.is_operand else "attribute",
                "keyword_only": argument.keyword_only,
                "default": argument.default,
            }
            for argument in schema.arguments
        ],
        "operands": [argument.name for argument in schema.operands],
        "attributes": [argument.name for argument in schema.attributes],
        "returns": [str(ret) for ret in schema.returns],
        "symint": schema.takes_symints,
        "properties": list(schema.properties.names),
        "opkind": schema.opkind,
    }


def backend_listing(backend: Backend) -> dict[str, Any]:
    """Everything that a YAML says, as plain data."""
    return {
        "backend": backend.name,
        "cpp_namespace": backend.cpp_namespace,
        "class_name": backend.class_name,
        "nodes": [node_listing(schema) for schema in backend.nodes],
        "non_native": [node_listing(schema) for schema in backend.non_native],
        "shape_functions": [
            {
                "operator": function.operator,
                "name": function.name,
                "signature": shape_signature(function.schema),
                "cpp_name": function.cpp_name,
                "cpp_declaration": function.cpp_declaration,
            }
            for function in backend.shape_functions
        ],
        **{
            str(section): [operator.name for operator in backend.of(section)]
            for section in Section
            if section is not Section.SYMINT
        },
    }


def to_json(listing: Any) -> str:
    return json.dumps(listing, indent=2) + "\n"


def emit_table(entries: Sequence[OpEntry], torch_version: str, command: str) -> str:
    """The recorder's rows for some operators, one in a line."""
    rows = ",\n".join(f"    {json.dumps(asdict(entry))}" for entry in entries)
    head = f'  "generated_by": {json.dumps(command)},\n  "torch": {json.dumps(torch_version)},\n  "operators": [\n'
    return f"{{\n{head}{rows}\n  ]\n}}\n"
