"""What tarry generates for itself: the recorder's table, typed nodes, TorchScript lowerings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import tarry
from tarry import generated, nodes
from tarry.backends.torchscript import types
from tarry.codegen.emit.torchscript import jit_type
from tarry.codegen.natives import natives
from tarry.codegen.op_table import RULES_FILE, Fails, Kind, facts, load_table, make_table, operator_rules
from tarry.codegen.own import _lowered, own_modules
from tarry.codegen.reading import load_backend
from tarry.ir.operators import TARRY_OPERATORS, overload
from tarry.ir.typed import TypedNode

USES_DEVICE = True


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="a name that another version lacks says nothing")
def test_the_names_in_the_yaml_are_operators() -> None:
    rules = operator_rules()
    names = set(natives().by_name)
    bases = {str(function.func.name.name) for function in natives().by_name.values()}
    forms = {function.func.name.name.base for function in natives().by_name.values()} | set(rules.non_native)
    columns = dict(rules.columns)
    assert rules.kernels | rules.leaves | columns.pop("overwrites") | rules.outside_graphs <= names
    outside = {rules.kind(natives().by_name[name]) for name in rules.outside_graphs}
    assert outside <= {Kind.KERNEL, Kind.DECOMPOSE, Kind.VIEW}
    assert rules.graph_views <= {name for name, function in natives().by_name.items() if function.is_view_op}
    assert rules.factories <= bases
    assert rules.decompose <= bases | names
    assert columns.pop("scatters") | columns.pop("rounds_numbers") | columns.pop("numbers_on_host") <= forms
    assert rules.unsupported <= forms
    for column, listed in columns.items():
        assert listed <= bases, column
    assert set(rules.fails) <= forms | names
    assert set(rules.index_arguments) | set(rules.elements) <= forms
    assert {found for several in rules.elements.values() for found in several if found} <= names


def test_the_nodes_of_the_yaml_that_only_graphs_have_are_those_of_the_ir() -> None:
    backend = load_backend(RULES_FILE)
    assert {schema.qualified_name for schema in backend.non_native} == set(TARRY_OPERATORS)
    for schema in backend.non_native:
        assert TARRY_OPERATORS[schema.qualified_name].schema == f"tarry::{schema.text}"


def test_an_operator_with_a_kernel_on_the_cpu_does_not_decompose() -> None:
    """Its parts round differently from the kernel: the reference path would not give eager's bits."""
    table = {entry.name: entry for entry in make_table()}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = {
        name
        for name, entry in table.items()
        if entry.kind is Kind.DECOMPOSE and has(name, "CompositeImplicitAutograd") and has(name, "CPU")
    }
    assert found <= {"aten::native_channel_shuffle"}  # its parts only move elements, and have its gradient


def test_the_table_says_what_becomes_of_operators() -> None:
    table = {entry.name: entry for entry in make_table()}
    assert table["aten::add.Tensor"].kind is Kind.RECORD
    assert table["aten::einsum"].kind is Kind.DECOMPOSE
    assert table["aten::transpose.int"].kind is Kind.VIEW
    assert table["aten::copy_"].kind is Kind.KERNEL
    assert table["aten::_nested_tensor_size"].kind is Kind.OPAQUE
    assert table["aten::add_.Tensor"].mutable_arguments == ("self",)
    assert table["aten::nonzero"].dynamic
    assert not table["aten::index.Tensor"].dynamic  # only with a mask
    # The bits, in the order of csrc/core/operator.h.
    assert table["aten::add.Tensor"].flags == 0b00100110000000
    assert table["aten::normal_"].flags == 0b100001010000101
    assert table["aten::index.Tensor"].flags == 0b10000010110000
    assert table["aten::arange"].flags == 0b00100010001000


def test_the_table_says_when_operators_fail() -> None:
    table = {entry.name: entry for entry in make_table()}
    for name in ("mm", "add_.Tensor", "transpose.int", "_foreach_sqrt_", "sum.out", "fill_.Scalar", "zero_"):
        assert table[f"aten::{name}"].fails is Fails.NEVER, name
    for name in ("div.Tensor_mode", "floor_divide_.Scalar", "pow.Tensor_Scalar_out", "_foreach_pow.List"):
        assert table[f"aten::{name}"].fails is Fails.ON_INTEGERS, name
    for name in ("normal_", "bernoulli_.float", "exponential.out"):
        assert table[f"aten::{name}"].fails is Fails.ON_NUMBERS, name
    for name in ("index.Tensor", "index_put_", "embedding", "gather.out", "nll_loss_forward"):
        assert table[f"aten::{name}"].fails is Fails.ON_INDEX, name
    for name in ("linalg_inv_ex.inverse", "bernoulli", "binary_cross_entropy", "normal.Tensor_Tensor"):
        assert table[f"aten::{name}"].fails is Fails.ON_DATA, name
    assert table["tarry::strided_scatter"].fails is Fails.NEVER
    unknown = facts("some::operator")
    assert (unknown.fails, unknown.is_custom) == (Fails.ON_DATA, True), "what is not listed may fail"


def test_the_table_says_what_operators_on_lists_apply_to_each() -> None:
    def element(name: str) -> str | None:
        return facts(f"aten::{name}").element

    assert element("_foreach_add.List") == element("_foreach_add.Tensor") == "aten::add.Tensor"
    assert element("_foreach_add.ScalarList") == "aten::add.Scalar"
    assert element("_foreach_pow.ScalarAndTensor") == "aten::pow.Scalar"
    assert element("_foreach_addcmul.Tensor") is None
    assert element("_foreach_sqrt") == "aten::sqrt"
    assert element("_foreach_norm.Scalar") == "aten::linalg_vector_norm"
    assert element("_foreach_sqrt_") is None
    assert facts("aten::_foreach_sqrt_").on_lists
    assert not facts("aten::sqrt").on_lists


def test_the_table_is_kept(tmp_path: Path) -> None:
    made = load_table(tmp_path)
    (kept,) = tmp_path.glob("operators-*.json")
    assert load_table(tmp_path) == made == make_table()
    kept.write_text("damaged")
    assert load_table(tmp_path) == made


def test_every_leaf_is_in_full_codegen() -> None:
    backend = load_backend(RULES_FILE)
    listed = {operator.name for operator in backend.operators}
    leaves = {entry.name.removeprefix("aten::") for entry in make_table() if entry.kind is Kind.RECORD}
    assert len(leaves - listed) < 20  # those with arguments that no node can hold; torch 2.11 has more
    assert yaml.safe_load(RULES_FILE.read_text())["full_codegen"] == "*"


def test_generated_lowerings_have_the_types_of_the_schemas() -> None:
    checked = 0
    for schema in _lowered(load_backend(RULES_FILE).nodes):
        real = overload(schema.qualified_name)._schema
        assert [argument.name for argument in schema.arguments] == [argument.name for argument in real.arguments]
        made = [str(getattr(types, jit_type(argument.type))) for argument in schema.arguments]
        assert made == [str(argument.type) for argument in real.arguments], schema.name
        returned = [str(getattr(types, jit_type(ret))) for ret in schema.returns]
        assert returned == [str(ret.type) for ret in real.returns], schema.name
        checked += 1
    assert checked > 2500


def test_every_node_of_a_program_has_a_typed_view(device: str) -> None:
    net = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(device)
    loss = net(torch.randn(2, 3, 8).to(device)).sum()
    loss.backward()
    for stage in ("recorded", "optimized"):
        graph = tarry.graph(*[p.grad for p in net.parameters() if p.grad is not None], stage=stage)
        for node in graph.nodes:
            view = nodes.typed(node)
            if view is None:  # tarry's own kernels and views have no class
                assert natives().by_name[node.op.removeprefix("aten::")].is_view_op or node.op.startswith("aten::")
                continue
            assert isinstance(view, TypedNode)
            assert view.args == node.args
            assert view.op == node.op
    assert nodes.AddTensor.op == "aten::add.Tensor"
    assert nodes.StridedView.op == "tarry::strided_view"
    assert "AddTensor" in dir(nodes)
    with pytest.raises(AttributeError, match="no attribute 'AddTensr'"):
        nodes.AddTensr


def test_without_a_place_to_write_lowering_goes_by_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    from tarry.backends.torchscript import lowering

    monkeypatch.setattr(generated, "module", lambda name: None)
    lowering._generated_lowering.cache_clear()
    tarry.set_backend("torchscript")
    try:
        x = torch.arange(4.0, device="tarry")
        assert torch.stack(torch.chunk((x + 1) * 2, 2)).tolist() == [[2.0, 4.0], [6.0, 8.0]]
    finally:
        tarry.set_backend("eager")
        lowering._generated_lowering.cache_clear()


@pytest.mark.slow
def test_what_is_generated_for_every_leaf_passes_the_linter(tmp_path: Path) -> None:
    """All two thousand operators that tarry records: whatever names, types and defaults schemas have."""
    pytest.importorskip("ruff")
    for name, text in own_modules().items():
        (tmp_path / name).write_text(text)
    config = Path(__file__).parent.parent.parent / "pyproject.toml"
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(config), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
