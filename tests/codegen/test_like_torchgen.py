"""The model of a YAML is what PyTorch's own generator makes of it: classes, fields, operands, shape functions."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import yaml

from tarry.codegen import load_backend
from tarry.codegen.model import Backend, LazySchema
from tarry.codegen.natives import natives
from tarry.codegen.schema import Rejected, function_name, native_schema
from tests.codegen import torchgen_reference
from tests.codegen.torchgen_reference import Node, reference
from tests.codegen.yamls import YAMLS, write


def _node(schema: LazySchema) -> Node:
    return (
        schema.class_name,
        tuple(argument.name for argument in schema.arguments),
        tuple(argument.name for argument in schema.operands),
        tuple(argument.name for argument in schema.attributes),
        len(schema.returns),
    )


def _assert_same(backend: Backend, path: Path) -> None:
    expected = reference(path)
    assert sorted(map(_node, backend.nodes)) == sorted(expected.nodes)
    assert list(map(_node, backend.non_native)) == expected.non_native
    owed = [function.cpp_declaration for function in backend.shape_functions]
    assert sorted(owed) == sorted(expected.shape_declarations)


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_in_the_manner_of_real_ones(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, YAMLS[name])
    _assert_same(load_backend(path), path)


@pytest.mark.skipif("TARRY_BACKEND_YAMLS" not in os.environ, reason="TARRY_BACKEND_YAMLS names no folder of YAMLs")
def test_the_yamls_of_a_folder() -> None:
    paths = sorted(Path(os.environ["TARRY_BACKEND_YAMLS"]).glob("*.yaml"))
    assert paths
    for path in paths:
        _assert_same(load_backend(path), path)


def _accepted_by_both() -> list[str]:
    """Operators that both convert; torchgen has no classes for lists of optional tensors."""
    names = []
    for name, function in natives().by_name.items():
        try:
            schema = native_schema(function)
        except Rejected:
            continue
        if not any(argument.type.has_optional_elements for argument in schema.arguments):
            names.append(name)
    return names


@pytest.mark.parametrize("seed", range(6))
def test_random_lists_of_operators(seed: int, tmp_path: Path) -> None:
    chosen = random.Random(seed).sample(_accepted_by_both(), 400)
    by_class: dict[str, str] = {}
    for name in chosen:  # torchgen gives some operators the same class, which cannot work
        by_class.setdefault(native_schema(natives().by_name[name]).class_name, name)
    names = list(by_class.values())
    third = len(names) // 3
    full, ir_gen, supported = names[:third], names[third : 2 * third], names[2 * third :]
    content = {
        "backend": "Lazy",
        "cpp_namespace": "torch::lazy",
        "full_codegen": full,
        "ir_gen": ir_gen,
        "supported": supported + ir_gen[::2],  # a node without a kernel takes no symbolic sizes
        "symint": full[::2] + ir_gen[::3],
    }
    path = write(tmp_path, yaml.safe_dump(content))
    _assert_same(load_backend(path), path)


def test_every_native_function_converts_or_is_rejected_with_a_reason() -> None:
    torchgen_reference.reference_values()
    rejected = {}
    for name, function in natives().by_name.items():
        for takes_symints in (False, True):
            expected: Node | None
            try:
                expected = torchgen_reference.schema_node(function, takes_symints)
            except AssertionError:
                expected = None
            try:
                schema = native_schema(function, takes_symints=takes_symints)
            except Rejected as reason:
                rejected[name] = str(reason)
                assert expected is None, name
            else:
                assert _node(schema) == expected, name
    assert len(natives().by_name) > 2500
    assert all("which a node cannot hold" in reason for reason in rejected.values())
    assert 0 < len(rejected) < 200


def test_functions_of_operators_have_names_of_their_own() -> None:
    names = [function_name(name) for name in natives().by_name]
    assert len(names) == len(set(names))
    assert all(name.isidentifier() for name in names)


def test_operators_that_torchgen_gives_the_same_class_have_classes_of_their_own(tmp_path: Path) -> None:
    text = """\
backend: Lazy
cpp_namespace: x
full_codegen: [add.Tensor, add_.Tensor, _softmax, softmax.int, _unique, _adaptive_avg_pool2d, adaptive_avg_pool2d]
"""
    names = {node.name: node.class_name for node in load_backend(write(tmp_path, text)).nodes}
    assert names["add.Tensor"] == "AddTensor"
    assert names["add_.Tensor"] == "AddTensorInPlace"
    assert names["adaptive_avg_pool2d"] == "AdaptiveAvgPool2d"
    assert names["_adaptive_avg_pool2d"] == "PrivateAdaptiveAvgPool2d"
    assert names["_softmax"] == "Softmax"
    assert len(set(names.values())) == len(names)
