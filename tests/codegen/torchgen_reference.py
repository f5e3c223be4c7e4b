"""What PyTorch's own generator makes of a backend's YAML, as data to compare with."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchgen.api.lazy import LazyIrSchema, setValueT
from torchgen.api.types import BaseCppType
from torchgen.dest.lazy_ir import GenLazyIR, GenLazyShapeInferenceDefinition, generate_non_native_lazy_ir_nodes
from torchgen.gen import get_grouped_native_functions, parse_native_yaml
from torchgen.gen_backend_stubs import parse_backend_yaml
from torchgen.gen_lazy_tensor import parse_native_functions_keys
from torchgen.model import NativeFunction

from tarry.codegen.natives import native_folder

Node = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...], int]
"""Class, fields, operands, attributes, number of results."""


@dataclass(frozen=True)
class Reference:
    nodes: list[Node]
    non_native: list[Node]
    shape_declarations: list[str]


@dataclass(frozen=True)
class _Recording(GenLazyIR):
    """Notes the schema of each class that it is asked for, and lets torchgen make the class: some it refuses."""

    def gen(self, schema: LazyIrSchema) -> list[str]:
        super().gen(schema)
        RECORDED.append(node_of(schema))
        return [""]


RECORDED: list[Node] = []


def node_of(schema: LazyIrSchema) -> Node:
    return (
        schema.node_name,
        tuple(argument.name for argument in schema.filtered_args()),
        tuple(argument.name for argument in schema.filtered_args(values=True, scalars=False)),
        tuple(argument.name for argument in schema.filtered_args(values=False, scalars=True)),
        len(schema.returns),
    )


@functools.cache
def grouped() -> tuple[Any, ...]:
    folder = native_folder()
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    return tuple(get_grouped_native_functions(parsed.native_functions)), parsed.backend_indices


def reference(path: Path) -> Reference:
    """Run the parts of torchgen that read the YAML and make classes. AssertionError if it refuses the file."""
    setValueT(BaseCppType("torch::lazy", "Value"))
    groups, indices = grouped()
    parsed = parse_backend_yaml(str(path), groups, dict(indices))
    full_codegen, non_native, ir_gen = parse_native_functions_keys(str(path), groups)
    functions: list[NativeFunction] = []
    for group in groups:
        functions += [group] if isinstance(group, NativeFunction) else list(group.functions())
    index = parsed.backend_indices[parsed.backend_key]
    generator = _Recording(index, "Reference", "Node", True)
    RECORDED.clear()
    for function in functions:
        if function.func.name in full_codegen + ir_gen:
            generator(function)
    nodes = list(RECORDED)
    RECORDED.clear()
    generate_non_native_lazy_ir_nodes(non_native, generator)
    shapes = GenLazyShapeInferenceDefinition(index, "torch::lazy::LazyTensor")
    owed = [line for function in functions if function.func.name in full_codegen for line in shapes(function)]
    return Reference(nodes, list(RECORDED), owed)


def reference_values() -> None:
    """Let torchgen know which C++ type its values have, without which it makes no schemas."""
    setValueT(BaseCppType("torch::lazy", "Value"))


def schema_node(function: NativeFunction, takes_symints: bool) -> Node:
    return node_of(LazyIrSchema(function.func, symint=takes_symints))
