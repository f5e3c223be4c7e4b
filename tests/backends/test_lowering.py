"""The walk that backends share: each value becomes something, once, in an order in which it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tarry.backends.base import Computation
from tarry.backends.lowering import LoweringContext, post_order
from tarry.errors import BackendError
from tarry.ir.graph import Node, Number, Value
from tarry.ir.text import parse
from tests.backends.simple import Walking, using

USES_DEVICE = True

GRAPH = """
    graph(%0: f32[2, 3], %1: f32[2, 3]):
      %2: f32[2, 3] = aten::sin(%0)
      %3: f32[4, 3] = aten::cat([%2, %1], 0)
      (%4: f32[4, 3], %5: i64[4, 3]) = aten::sort(%3, 1, False)
      %6: f32[2, 3] = aten::mul.Tensor(%2, $0=2.0)
      (%7: f32[2, 3], %8: f32[3], _) = aten::native_layer_norm_backward(%6, %6, [3], %6, %6, None, None, [True])
      %9: f32[2, 3] = aten::neg(%1)
      return %4, %9 -> %1, %6
"""


class Expressions(LoweringContext[str]):
    """Lowers to Python expressions, which are easy to compare."""

    def parameter(self, position: int, value: Value) -> str:
        return f"p{position}"

    def number(self, number: Number) -> str:
        return f"n{number.index}"

    def constant(self, constant: Any) -> Any:
        return ("constant", constant) if isinstance(constant, bool) else constant

    def emit(self, node: Node, args: tuple[Any, ...]) -> list[str | None]:
        self.seen.append((node.op, args))
        name = node.op.removeprefix("aten::").partition(".")[0]
        made = f"{name}({', '.join(map(str, args))})"
        return [None if value is None else f"{made}#{k}" for k, value in enumerate(node.outputs)]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[str, tuple[Any, ...]]] = []


def test_the_whole_graph() -> None:
    context = Expressions(parse(GRAPH)).lower()
    assert context.parameters == ["p0", "p1"]
    assert context.emitted_nodes == 6
    assert context.results[1] == "neg(p1)#0"
    assert context.aliases == {1: 1}
    by_op = dict(context.seen)
    assert by_op["aten::cat"] == (("sin(p0)#0", "p1"), 0)
    assert by_op["aten::mul.Tensor"] == ("sin(p0)#0", "n0")
    assert by_op["aten::sort"][2] == ("constant", False)


def test_only_what_some_values_need() -> None:
    graph = parse(GRAPH)
    wanted = post_order(graph, [graph.outputs[2]])
    assert [node.op for node in wanted] == ["aten::sin", "aten::mul.Tensor"]
    context = Expressions(graph).lower(wanted)
    assert context.emitted_nodes == 2
    assert context.results == []
    assert post_order(graph, list(graph.inputs)) == []
    assert post_order(graph, list(graph.outputs)) == [node for node in graph.nodes if "backward" not in node.op]


def test_values_that_are_there_already() -> None:
    graph = parse(GRAPH)
    made = {graph.inputs[0]: "given", graph.nodes[0].results[0]: "known"}
    context = Expressions(graph, emitted=made).lower()
    assert context.parameters == ["p1"]
    assert "aten::sin" not in dict(context.seen)
    assert dict(context.seen)["aten::mul.Tensor"] == ("known", "n0")


@pytest.mark.parametrize(
    ("emit", "message"),
    [
        (lambda node: [], r"lowering of .*aten::sin.* made 0 values, not 1"),
        (lambda node: ["a", "b"], r"aten::sin.* made 2 values, not 1"),
        (lambda node: [None], r"aten::sin.* made nothing for %2"),
    ],
)
def test_what_is_wrong_is_named(emit: Callable[[Node], list[Any]], message: str) -> None:
    class Wrong(Expressions):
        def emit(self, node: Node, args: tuple[Any, ...]) -> list[Any]:
            return emit(node)

    with pytest.raises(BackendError, match=message):
        Wrong(parse(GRAPH)).lower()


@pytest.mark.parametrize(
    "call", [lambda c: c.parameter(0, None), lambda c: c.number(None), lambda c: c.emit(None, ()), lambda c: c.build()]
)
def test_a_subclass_says_what_things_become(call: Callable[[Any], Any]) -> None:
    with pytest.raises(NotImplementedError):
        call(LoweringContext(parse(GRAPH)))


Closure = Callable[[list[torch.Tensor], list[Any]], Any]


class Closures(LoweringContext[Closure]):
    """Lowers to functions of inputs and numbers: a backend in a few lines."""

    def parameter(self, position: int, value: Value) -> Closure:
        return lambda inputs, numbers: inputs[position]

    def number(self, number: Number) -> Closure:
        return lambda inputs, numbers: numbers[number.index]

    def emit(self, node: Node, args: tuple[Any, ...]) -> list[Closure]:
        function = {"aten::sin": torch.sin, "aten::add.Tensor": torch.add, "aten::mul.Tensor": torch.mul}[node.op]
        operands = args[:2] if node.op != "aten::sin" else args
        return [lambda inputs, numbers: function(*(arg(inputs, numbers) if callable(arg) else arg for arg in operands))]

    def build(self) -> Computation:
        results = self.results
        return Computation(lambda inputs, numbers: [result(inputs, numbers) for result in results], self.graph)


def test_a_backend_made_of_it() -> None:
    class Closing(Walking):
        def compile(self, graph: Any) -> Computation:
            return Closures(graph).lower().build()

    with using(Closing(only=["aten::sin", "aten::add.Tensor", "aten::mul.Tensor"])):
        x = torch.linspace(-1, 1, 5)
        lazy = x.to("tarry")
        for factor in (2.0, 3.0):
            torch.testing.assert_close((lazy.sin() * factor + lazy).exp().cpu(), (x.sin() * factor + x).exp())
