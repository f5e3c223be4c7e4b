"""What tarry generates for itself from tarry.yaml: classes of nodes and TorchScript lowerings, in modules by letter.

There are two thousand leaf operators, and a program uses few of them: a process loads the modules that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tarry.codegen.emit.nodes import NodeOptions, emit_nodes
from tarry.codegen.emit.torchscript import emit_lowerings
from tarry.codegen.model import LazySchema
from tarry.codegen.natives import natives
from tarry.codegen.op_table import RULES_FILE, Kind, operator_rules
from tarry.codegen.reading import load_backend
from tarry.codegen.schema import Rejected, lazy_type, native_schema
from tarry.codegen.shards import shard

COMMAND = "python -m tarry.codegen --source-yaml tarry/codegen/tarry.yaml --output-dir DIR"


def own_modules() -> dict[str, str]:
    """The text of each file by its name. `names.json` says which operator each class is of."""
    backend = load_backend(RULES_FILE)
    files = {"names.json": json.dumps({schema.class_name: schema.qualified_name for schema in backend.all_nodes})}
    for letter, schemas in _by_shard(backend.all_nodes).items():
        files[f"nodes_{letter}.py"] = emit_nodes(schemas, NodeOptions(COMMAND), "Nodes of operators.")
    for letter, schemas in _by_shard(_lowered(backend.nodes)).items():
        files[f"torchscript_{letter}.py"] = emit_lowerings(schemas, COMMAND)
    return files


def _lowered(nodes: Iterable[LazySchema]) -> list[LazySchema]:
    """The leaf operators, and what lowerings of them are made of besides: views, and what decomposes on the device."""
    found = {schema.name: schema for schema in nodes}
    rules = operator_rules()
    for name, function in natives().by_name.items():
        try:
            for ret in function.func.returns:
                lazy_type(ret.type)
            if name not in found and rules.kind(function) in (Kind.VIEW, Kind.KERNEL, Kind.DECOMPOSE):
                found[name] = native_schema(function)
        except Rejected:
            found.pop(name, None)
    return [found[name] for name in sorted(found)]


def _by_shard(schemas: Iterable[LazySchema]) -> dict[str, list[LazySchema]]:
    shards: dict[str, list[LazySchema]] = {}
    for schema in schemas:
        shards.setdefault(shard(schema.name), []).append(schema)
    return shards
