"""Equality by structure, and the builder."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from tarry.ir import GraphBuilder, Node, Number, TensorType, Value, parse, producers, to_text, users
from tarry.ir.graph import typed

F32_8 = TensorType.contiguous(torch.float32, (8,))


def node(*args: object) -> Node:
    return Node("aten::mul.Scalar", args, (Value(1, F32_8),))  # type: ignore[arg-type]


def test_constants_are_compared_with_their_types() -> None:
    x = Value(0, F32_8)
    assert node(x, 1) == node(x, 1)
    assert hash(node(x, 1)) == hash(node(x, 1))
    assert len({node(x, 1), node(x, 1.0), node(x, True)}) == 3
    assert node(x, 0.0) != node(x, -0.0)
    assert node(x, float("nan")) == node(x, float("nan"))
    assert node(x, (1, 2)) != node(x, (1, 2.0))
    assert typed(1 + 0j) != typed(1.0)


def test_the_recorded_value_of_a_number_is_no_part_of_the_graph() -> None:
    text = "graph(%0: f32[8]):\n  %1: f32[8] = aten::mul.Scalar(%0, $0={})\n  return %1"
    assert parse(text.format("0.001")) == parse(text.format("0.002"))
    assert hash(parse(text.format("0.001"))) == hash(parse(text.format("0.002")))
    assert parse(text.format("1")) != parse(text.format("1.0"))  # another dtype
    assert parse(text.format("1.0")) != parse(text.format("wrapped(1.0)"))


def test_graphs_cannot_be_changed() -> None:
    graph = parse("graph(%0: f32[8]):\n  return %0")
    with pytest.raises(FrozenInstanceError):
        graph.outputs = ()  # type: ignore[misc]
    assert replace(graph, outputs=(), replaces=()).outputs == ()


def test_users_and_producers() -> None:
    graph = parse("""
graph(%0: f32[8], %1: f32[8]):
  %2: f32[8] = aten::add.Tensor(%0, %0, alpha=1)
  %3: f32[8] = aten::mul.Tensor(%2, %0)
  return %3
""")
    add, mul = graph.nodes
    assert users(graph) == {
        graph.inputs[0]: [add, mul],
        graph.inputs[1]: [],
        add.results[0]: [mul],
        mul.results[0]: [],
    }
    assert producers(graph) == {add.results[0]: add, mul.results[0]: mul}
    assert mul.operands == (add.results[0], graph.inputs[0])


def test_a_builder_numbers_values_in_order_of_definition() -> None:
    source = parse("""
graph(%7: f32[8]):
  %5: f32[8] = aten::neg(%7)
  %3: f32[8] = aten::neg(%5)
  %9: f32[8] = aten::add.Tensor(%3, %5, alpha=$0=1)  # a.py:1
  return %9 -> %7
""")
    builder = GraphBuilder(source)
    first, second, third = source.nodes
    builder.copy(first)
    builder.replace(second.results[0], builder.resolve(second.args[0]))
    builder.copy(third, region=2)
    assert (
        to_text(builder.finish())
        == """\
graph(%0: f32[8]):
  %1: f32[8] = aten::neg(%0)
  %2: f32[8] = aten::add.Tensor(%1, %1, alpha=$0=1) [region=2]  # a.py:1
  return %2 -> %0"""
    )


def test_a_builder_from_nothing() -> None:
    builder = GraphBuilder()
    x = builder.input(F32_8)
    rate = builder.number("number", torch.float64, 0.1)
    assert rate == Number(0, "number", torch.float64, 0.2)
    y = builder.one("aten::mul.Scalar", (x, rate), F32_8)
    with pytest.raises(ValueError, match="inputs come before all nodes"):
        builder.input(F32_8)
    assert str(builder.finish([y])) == "graph(%0: f32[8]):\n  %1: f32[8] = aten::mul.Scalar(%0, $0=0.1)\n  return %1"
