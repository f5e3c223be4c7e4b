"""Every rule catches a graph that breaks it, and names the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tarry.errors import IRError
from tarry.ir import RULES, Graph, Node, Number, TensorType, Value, parse, verify
from tarry.ir.verify import STAGES

LEGAL = """
graph(%0: f32[4, 8], %1: f32[8]):
  %2: f32[8] = tarry::strided_view(%0, f32, [8], [1], 8)
  %3: f32[8] = aten::add_.Tensor(%2, %1, alpha=$0=1)
  %4: f32[4, 8] = tarry::strided_scatter(%0, %3, f32, [8], [1], 8)
  %5: f32[8] = aten::uniform_(%1, 0.0, 1.0, generator=$1=seed(5))
  return %4 -> %0, %5
"""


def text(*changes: str) -> Callable[[], Graph]:
    """The legal graph with pieces of its text replaced: before, after, before, after..."""
    changed = LEGAL
    for before, after in zip(changes[::2], changes[1::2], strict=True):
        assert before in changed
        changed = changed.replace(before, after)
    return lambda: parse(changed)


def change(**fields: Any) -> Callable[[], Graph]:
    return lambda: replace(parse(LEGAL), **fields)


def change_node(index: int, **fields: Any) -> Callable[[], Graph]:
    def make() -> Graph:
        graph = parse(LEGAL)
        nodes = list(graph.nodes)
        nodes[index] = replace(nodes[index], **fields)
        return replace(graph, nodes=tuple(nodes))

    return make


X = Value(0, TensorType.contiguous(torch.float32, (4, 8)))
ROW = TensorType.contiguous(torch.float32, (8,))
MATRIX = TensorType.contiguous(torch.float32, (4, 8))


def batch_norm(training: bool) -> Callable[[], Graph]:
    return lambda: parse(f"""
graph(%0: f32[2, 3], %1: f32[3], %2: f32[3]):
  (%3: f32[2, 3], %4: f32[3], %5: f32[3]) = aten::native_batch_norm(%0, None, None, %1, %2, {training}, 0.1, 1e-05)
  return %3
""")


def small(body: str, outputs: str = "%1") -> Callable[[], Graph]:
    return lambda: parse(f"graph(%0: f32[4, 8]):\n  {body}\n  return {outputs}")


BROKEN: list[tuple[str, str, Callable[[], Graph], str]] = [
    ("defined-once", "recorded", change(inputs=(X, X)), "input %0 is defined twice"),
    ("defined-once", "recorded", text("%4: f32[4, 8] =", "%0: f32[4, 8] =", "%4 ->", "%0 ->"), "%0 is defined twice"),
    (
        "defined-before-use",
        "recorded",
        change_node(0, args=(Value(9, MATRIX), torch.float32, (8,), (1,), 8)),
        "%9 is rea",
    ),
    ("defined-before-use", "recorded", change(outputs=(X, Value(9, ROW))), "output %9 of the graph is not defined"),
    ("defined-before-use", "recorded", change(outputs=(Value(0, ROW),)), "output %0 of the graph is not defined with"),
    (
        "defined-before-use",
        "recorded",
        change_node(0, args=(Value(0, ROW), torch.float32, (8,), (1,), 8)),
        r"%0 is read as f32\[8\], but is f32\[4, 8\] where it is defined",
    ),
    (
        "types-well-formed",
        "recorded",
        change(inputs=(X, Value(1, ROW), Value(7, TensorType(torch.float32, (4,), ())))),
        "%7 has no sound type",
    ),
    ("numbers-declared", "recorded", change(numbers=()), r"\$0=1 is not a number of the graph"),
    (
        "numbers-declared",
        "recorded",
        change(numbers=(Number(1, "number", torch.int64, 1), Number(1, "seed", torch.int64, 1))),
        "number 0 of the graph has index 1",
    ),
    ("operator-exists", "recorded", change_node(1, op="aten::nothing"), "there is no operator 'aten::nothing'"),
    ("arity", "recorded", change_node(1, args=(Value(2, ROW),)), "aten::add_.Tensor has 1 arguments, its schema 3"),
    (
        "argument-kinds",
        "recorded",
        text("aten::add_.Tensor(%2, %1", "aten::add_.Tensor(%2, [%1]"),
        r"argument other of aten::add_.Tensor is \[%1\], not Tensor",
    ),
    ("argument-kinds", "recorded", text("alpha=$0=1", "alpha=$0=seed(1)"), r"argument alpha .* is \$0=seed\(1\)"),
    ("argument-kinds", "recorded", text("$1=seed(5)", "$1=5"), "argument generator"),
    ("argument-kinds", "recorded", change_node(3, seed=Number(0, "number", torch.int64, 1)), r"seed .* is \$0=1"),
    (
        "numbers-declared",
        "recorded",
        change_node(3, seed=Number(9, "seed", torch.int64, 1)),
        r"\$9=seed\(1\) is not a n",
    ),
    ("argument-kinds", "recorded", text("f32, [8], [1], 8)\n  %3", "f32, 8, [1], 8)\n  %3"), "argument sizes"),
    ("argument-kinds", "recorded", text("f32, [8], [1], 8)\n  %3", "f32, [8.0], [1], 8)\n  %3"), "argument sizes"),
    ("argument-kinds", "recorded", text("%0, f32, [8], [1], 8)\n  %3", "%0, 6, [8], [1], 8)\n  %3"), "argument dtype"),
    (
        "output-count",
        "recorded",
        text("%3: f32[8] = ", "(%3: f32[8], %7: f32[8]) = "),
        "aten::add_.Tensor has 2 outputs, should have 0 fresh and 1 written ones",
    ),
    (
        "output-count",
        "recorded",
        small("() = aten::_foreach_neg_([%0])", ""),
        "has 0 outputs, should have 0 fresh and 1",
    ),
    (
        "written-types",
        "recorded",
        text("%3: f32[8] = ", "%3: f64[8] = "),
        r"%2 is f32\[8\], but its new content is f64",
    ),
    ("written-types", "recorded", small("_ = aten::neg_(%0)", "%0"), "but its new content is nothing"),
    ("hidden-writes", "recorded", batch_norm(True), "updates running statistics in training: use aten::_native"),
    (
        "strided-types",
        "recorded",
        small("%1: f32[8]{2} = tarry::strided_view(%0, f32, [8], [1], 8)"),
        r"%1 is f32\[8\]\{2\}, should be f32\[8\]",
    ),
    (
        "strided-types",
        "recorded",
        small("%1: f32[4, 8] = tarry::strided_scatter(%0, %0, f32, [8], [1], 8)"),
        r"f32\[4, 8\] is scattered to f32\[8\]",
    ),
    (
        "strided-bounds",
        "recorded",
        small("%1: f32[8] = tarry::strided_view(%0, f32, [8], [1], 25)"),
        "bytes 100 to 132 of a buffer of 128 bytes",
    ),
    (
        "strided-bounds",
        "recorded",
        small("%1: f64[8]{2} = tarry::strided_view(%0, f64, [8], [2], 2)"),
        "bytes 16 to 136 of a buffer of 128 bytes",
    ),
    ("strided-bounds", "recorded", small("%1: f32[8] = tarry::strided_view(%0, f32, [8], [1], -1)"), "no sound layout"),
    ("view-types", "recorded", small("%1: f32[8, 4] = aten::permute(%0, [1, 0])"), r"should be f32\[8, 4\]\{1, 8\}"),
    ("view-types", "recorded", small("%1: f32[5] = aten::view(%0, [5])"), "is no view"),
    ("replaces", "recorded", change(replaces=(0,)), "2 outputs, but 1 entries in replaces"),
    ("replaces", "recorded", change(replaces=(5, None)), "output %4 replaces input 5 of 2"),
    ("replaces", "recorded", change(replaces=(1, None)), r"output %4: f32\[4, 8\] replaces an input of type f32\[8\]"),
    (
        "replaces",
        "recorded",
        small("%1: f32[4, 8] = aten::neg(%0)", "%0 -> %0, %1 -> %0"),
        "two outputs replace input 0",
    ),
    ("no-mutation", "functional", lambda: parse(LEGAL), "aten::add_.Tensor writes to its arguments"),
    ("no-strided-form", "views", small("%1: f32[8] = tarry::strided_view(%0, f32, [8], [1], 0)"), "is left"),
    (
        "as-strided-at-start",
        "views",
        small("%1: f32[8] = aten::select.int(%0, 0, 1)\n  %2: f32[2] = aten::as_strided(%1, [2], [1], 0)", "%2"),
        "%1 starts 8 elements into %0",
    ),
    ("outputs-owned", "optimized", small("%1: f32[4, 8] = aten::neg(%0)", "%0"), "output 0, %0, shares its buffer"),
    ("outputs-owned", "optimized", small("%1: f32[4, 8] = aten::neg(%0)", "%1, %1"), "output 1, %1, shares its buffer"),
    (
        "outputs-owned",
        "optimized",
        small("%1: f32[4, 8] = aten::neg(%0)\n  %2: f32[8] = aten::select.int(%1, 0, 0)", "%2"),
        "output 0, %2, shares its buffer or is a part of one",
    ),
    ("types-inferred", "recorded", small("%1: f32[4, 9] = aten::neg(%0)"), r"should be f32\[4, 8\]"),
    ("types-inferred", "recorded", small("%1: f32[4, 8] = aten::eq.Tensor(%0, %0)"), r"should be b8\[4, 8\]"),
]


def test_every_rule_has_a_graph_that_breaks_it() -> None:
    assert {case[0] for case in BROKEN} == {rule.name for rule in RULES}
    assert all(rule.meaning.endswith(".") for rule in RULES)


@pytest.mark.parametrize(("rule", "stage", "make", "message"), BROKEN, ids=[case[0] for case in BROKEN])
def test_broken_rules(rule: str, stage: str, make: Callable[[], Graph], message: str) -> None:
    graph = make()
    with pytest.raises(IRError, match=message) as caught:
        verify(graph, stage, thorough=rule == "types-inferred")
    assert f"rule '{rule}'" in str(caught.value)
    # What only holds later is no fault earlier.
    earlier = STAGES.index(stage) - 1
    if earlier >= 0:
        verify(graph, STAGES[earlier])


def test_legal_graphs() -> None:
    verify(parse(LEGAL), thorough=True)
    verify(batch_norm(False)(), thorough=True)
    kept = parse(LEGAL)
    kept = replace(kept, nodes=tuple(replace(node, kept=True) for node in kept.nodes))
    verify(kept, "functional")
    # A window with no elements may start anywhere; a view that relabels a whole fresh buffer is owned.
    verify(small("%1: f32[0] = tarry::strided_view(%0, f32, [0], [1], 99)")())
    verify(
        small("%1: f32[4, 8] = aten::neg(%0)\n  %2: f32[8, 4]{1, 8} = aten::permute(%1, [1, 0])", "%2")(), "optimized"
    )


def test_the_message_shows_the_node_and_its_neighbours() -> None:
    with pytest.raises(IRError) as caught:
        verify(text("%3: f32[8] = ", "%3: f64[8] = ")())
    assert (
        str(caught.value)
        == """\
illegal graph at stage 'recorded': %2 is f32[8], but its new content is f64[8]
  rule 'written-types': The new content of a written argument has that argument's type; only an out= argument may be \
resized.
    node 0: %2: f32[8] = tarry::strided_view(%0, f32, [8], [1], 8)
  > node 1: %3: f64[8] = aten::add_.Tensor(%2, %1, alpha=$0=1)
    node 2: %4: f32[4, 8] = tarry::strided_scatter(%0, %3, f32, [8], [1], 8)"""
    )


def test_unknown_operators_print_too() -> None:
    node = Node("aten::nothing", (X, 1), (Value(1, ROW),))
    with pytest.raises(IRError, match=r"> node 0: %1: f32\[8\] = aten::nothing\(%0, 1\)"):
        verify(Graph((X,), (), (node,), (), ()))
