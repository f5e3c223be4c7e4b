"""Numbers that become constants: of the right Python type, in place of the number, and nothing else changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tarry.ir.evaluate import evaluate
from tarry.ir.graph import Graph, GraphBuilder, Number, NumberKind, leaves
from tarry.ir.layout import TensorType
from tarry.ir.text import parse
from tarry.ir.verify import verify
from tarry.passes.specialize import specialize

GRAPH = """
    graph(%0: f32[3]):
      %1: f32[3] = aten::mul.Tensor(%0, $0=wrapped(2.0))
      %2: f32[3] = aten::add.Tensor(%1, %0, alpha=$1=3)
      %3: f32[3] = aten::bernoulli(%0, generator=$2=seed(5))
      %4: f32[3] = aten::mul.Tensor(%2, %3)
      return %4
"""


def _numbers(graph: Graph) -> list[int]:
    return sorted(leaf.index for node in graph.nodes for leaf in leaves(node.args) if isinstance(leaf, Number))


def test_some_numbers_become_constants() -> None:
    graph = parse(GRAPH)
    fixed = specialize(graph, {0: 5.0})
    verify(fixed, "optimized", thorough=True)
    assert fixed.nodes[0].args[1] == 5.0
    assert _numbers(fixed) == [1, 2]
    assert fixed.numbers == graph.numbers  # the signature stays
    x = torch.rand(3)
    (mine,) = evaluate(fixed, [x], [99.0, 3, 5])  # the first is no longer looked at
    (wanted,) = evaluate(graph, [x], [5.0, 3, 5])
    assert torch.equal(mine, wanted)


def test_nothing_to_do() -> None:
    graph = parse(GRAPH)
    assert specialize(graph, {}) is graph


def _graph(kind: NumberKind, dtype: torch.dtype, value: Any) -> Graph:
    builder = GraphBuilder()
    number = builder.number(kind, dtype, value)
    x = builder.input(TensorType.contiguous(torch.complex64, (2,)))
    if kind == "wrapped":
        return builder.finish([builder.one("aten::mul.Tensor", (x, number), x.type)])
    return builder.finish([builder.one("aten::fill.Scalar", (x, number), x.type)])


@pytest.mark.parametrize("kind", ["number", "wrapped"])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int64, 2**62 + 1),
        (torch.int64, -3),
        (torch.float64, -0.0),
        (torch.float64, math.nan),
        (torch.float64, -math.inf),
        (torch.bool, True),
        (torch.complex128, complex(1, -0.0)),
    ],
)
def test_a_constant_has_the_type_of_its_number(kind: NumberKind, dtype: torch.dtype, value: Any) -> None:
    fixed = specialize(_graph(kind, dtype, type(value)(0)), {0: value})
    constant = fixed.nodes[0].args[1]
    assert type(constant) is type(value)
    assert repr(constant) == repr(value)
