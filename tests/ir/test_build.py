"""Raw graphs become graphs: views on edges, writes through views, numbers, sites."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tarry.errors import IRError
from tarry.ir import evaluate, from_raw, to_text, verify
from tests.ir.raw import Recorder, const, edge, layout, raw_graph, raw_node, same_bits


def text(raw: dict[str, Any]) -> str:
    graph = from_raw(raw)
    verify(graph, thorough=True)
    return to_text(graph)


ADD = "aten::add.Tensor"
ONE = ("const", 1)


def test_reads_in_home_layout_are_the_values_themselves() -> None:
    raw = raw_graph(
        [layout(4, 8), layout(8)],
        [raw_node(ADD, [edge(0), edge(1), ("number", 0, 0.5)], [layout(4, 8)], line=12)],
        [2],
        numbers=(0.5,),
    )
    assert (
        text(raw)
        == """\
graph(%0: f32[4, 8], %1: f32[8]):
  %2: f32[4, 8] = aten::add.Tensor(%0, %1, alpha=$0=0.5)  # train.py:12
  return %2"""
    )


def test_a_view_is_made_once_per_value_and_layout() -> None:
    row = layout(8, offset=8)
    raw = raw_graph(
        [layout(4, 8)],
        [
            raw_node(ADD, [edge(0, row), edge(0, row), ONE], [layout(8)]),
            raw_node(ADD, [edge(0, row), edge(0, layout(8, offset=16)), ONE], [layout(8)], line=2),
            raw_node(ADD, [edge(0, layout(4, 8)), edge(0), ONE], [layout(4, 8)], line=3),
        ],
        [1, 2, 3],
    )
    assert (
        text(raw)
        == """\
graph(%0: f32[4, 8]):
  %1: f32[8] = tarry::strided_view(%0, f32, [8], [1], 8)  # train.py:1
  %2: f32[8] = aten::add.Tensor(%1, %1, alpha=1)  # train.py:1
  %3: f32[8] = tarry::strided_view(%0, f32, [8], [1], 16)  # train.py:2
  %4: f32[8] = aten::add.Tensor(%1, %3, alpha=1)  # train.py:2
  %5: f32[4, 8] = aten::add.Tensor(%0, %0, alpha=1)  # train.py:3
  return %2, %4, %5"""
    )


def test_a_write_keeps_the_operator_and_replaces_the_input() -> None:
    raw = raw_graph(
        [layout(4)],
        [raw_node("aten::add_.Tensor", [edge(0), ("wrapped", 0, 2, torch.int64), ONE], [layout(4)], mutated=(0,))],
        [1],
        [0],
        (2,),
    )
    assert (
        text(raw)
        == """\
graph(%0: f32[4]):
  %1: f32[4] = aten::add_.Tensor(%0, $0=wrapped(2), alpha=1)  # train.py:1
  return %1 -> %0"""
    )


def test_a_write_through_a_view_is_scattered_into_the_storage() -> None:
    column = layout(4, strides=(8,), offset=2)
    raw = raw_graph(
        [layout(4, 8)],
        [
            raw_node("aten::zero_", [edge(0, column)], [layout(4, 8)], mutated=(0,)),
            raw_node(ADD, [edge(1, column), edge(1, column), ONE], [layout(4)], line=2),
        ],
        [1, 2],
        [0, -1],
    )
    assert (
        text(raw)
        == """\
graph(%0: f32[4, 8]):
  %1: f32[4]{8} = tarry::strided_view(%0, f32, [4], [8], 2)  # train.py:1
  %2: f32[4]{8} = aten::zero_(%1)  # train.py:1
  %3: f32[4, 8] = tarry::strided_scatter(%0, %2, f32, [4], [8], 2)  # train.py:1
  %4: f32[4]{8} = tarry::strided_view(%3, f32, [4], [8], 2)  # train.py:2
  %5: f32[4] = aten::add.Tensor(%4, %4, alpha=1)  # train.py:2
  return %3 -> %0, %5"""
    )


def test_several_written_views_of_one_storage_are_scattered_one_after_the_other() -> None:
    rows = ("list", [edge(0, layout(8)), edge(1), edge(0, layout(8, offset=16))])
    raw = raw_graph(
        [layout(4, 8), layout(3)],
        [raw_node("aten::_foreach_mul_.Scalar", [rows, ("number", 0, 2.0)], [layout(4, 8), layout(3)], mutated=(0, 1))],
        [2, 3],
        [0, 1],
        (2.0,),
    )
    assert (
        text(raw)
        == """\
graph(%0: f32[4, 8], %1: f32[3]):
  %2: f32[8] = tarry::strided_view(%0, f32, [8], [1], 0)  # train.py:1
  %3: f32[8] = tarry::strided_view(%0, f32, [8], [1], 16)  # train.py:1
  (%4: f32[8], %5: f32[3], %6: f32[8]) = aten::_foreach_mul_.Scalar([%2, %1, %3], $0=2.0)  # train.py:1
  %7: f32[4, 8] = tarry::strided_scatter(%0, %4, f32, [8], [1], 0)  # train.py:1
  %8: f32[4, 8] = tarry::strided_scatter(%7, %6, f32, [8], [1], 16)  # train.py:1
  return %8 -> %0, %5 -> %1"""
    )


def test_overlapping_tensors_of_a_foreach_operator_are_updated_in_turn() -> None:
    x = torch.arange(6.0)
    recorder = Recorder()
    with recorder:
        torch._foreach_mul_([x, x[2:4], x[3:]], [2.0, 3.0, 5.0])
    graph = from_raw(recorder.raw())
    verify(graph)
    assert (
        to_text(graph)
        == """\
graph(%0: f32[6]):
  %1: f32[6] = aten::_foreach_mul_.ScalarList([%0], [$0=2.0])  # program.py:1
  %2: f32[2] = tarry::strided_view(%1, f32, [2], [1], 2)  # program.py:1
  %3: f32[2] = aten::_foreach_mul_.ScalarList([%2], [$1=3.0])  # program.py:1
  %4: f32[6] = tarry::strided_scatter(%1, %3, f32, [2], [1], 2)  # program.py:1
  %5: f32[3] = tarry::strided_view(%4, f32, [3], [1], 3)  # program.py:1
  %6: f32[3] = aten::_foreach_mul_.ScalarList([%5], [$2=5.0])  # program.py:1
  %7: f32[6] = tarry::strided_scatter(%4, %6, f32, [3], [1], 3)  # program.py:1
  return %7 -> %0"""
    )
    assert same_bits(evaluate(graph, recorder.inputs())[0], x)


def test_a_storage_seen_as_another_dtype() -> None:
    pairs = layout(3, 2)
    raw = raw_graph(
        [layout(3, dtype=torch.complex64)],
        [raw_node("aten::neg_", [edge(0, pairs)], [layout(3, dtype=torch.complex64)], mutated=(0,))],
        [1],
    )
    assert (
        text(raw)
        == """\
graph(%0: c64[3]):
  %1: f32[3, 2] = tarry::strided_view(%0, f32, [3, 2], [2, 1], 0)  # train.py:1
  %2: f32[3, 2] = aten::neg_(%1)  # train.py:1
  %3: c64[3] = tarry::strided_scatter(%0, %2, f32, [3, 2], [2, 1], 0)  # train.py:1
  return %3"""
    )


def test_batch_norm_admits_that_it_writes() -> None:
    stats = [layout(3), layout(3)]
    args = [edge(0), ("none",), ("none",), edge(1), edge(2), const(True), ("number", 0, 0.1), ("number", 1, 1e-5)]
    outputs = [layout(2, 3), layout(3), layout(3), *stats]
    raw = raw_graph(
        [layout(2, 3), *stats],
        [raw_node("aten::native_batch_norm", args, outputs, mutated=(1, 2))],
        [3, 6, 7],
        [-1, 1, 2],
        (0.1, 1e-5),
    )
    assert (
        text(raw)
        == """\
graph(%0: f32[2, 3], %1: f32[3], %2: f32[3]):
  (%3: f32[2, 3], %4: f32[3], %5: f32[3], %6: f32[3], %7: f32[3]) = aten::_native_batch_norm_legit(%0, None, None, \
%1, %2, True, $0=0.1, $1=1e-05)  # train.py:1
  return %3, %6 -> %1, %7 -> %2"""
    )


def test_outputs_that_do_not_exist_and_lists_with_holes() -> None:
    args = [
        edge(0),
        edge(1),
        edge(2),
        const([0]),
        const([1, 1]),
        const([0, 0]),
        const([1, 1]),
        const(False),
        const([0, 0]),
        const(1),
        const([False, True, False]),
    ]
    inputs = [layout(1, 1, 4, 4), layout(1, 1, 4, 4), layout(1, 1, 1, 1), layout(3, dtype=torch.int64)]
    index = raw_node("aten::index.Tensor", [edge(1), ("list", [("none",), edge(3)])], [layout(1, 3, 4, 4)], line=2)
    listed = raw_node("aten::convolution_backward", args, [None, layout(1, 1, 1, 1), None])
    left_out = raw_node("aten::convolution_backward", args, [layout(1, 1, 1, 1)]) | {"returned": (False, True, False)}
    expected = """\
graph(%0: f32[1, 1, 4, 4], %1: f32[1, 1, 4, 4], %2: f32[1, 1, 1, 1], %3: i64[3]):
  (_, %4: f32[1, 1, 1, 1], _) = aten::convolution_backward(%0, %1, %2, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, \
[False, True, False])  # train.py:1
  %5: f32[1, 3, 4, 4] = aten::index.Tensor(%1, [None, %3])  # train.py:2
  return %4, %5"""
    # An output that does not exist takes up an id if it is listed.
    assert text(raw_graph(inputs, [listed, index], [5, 7])) == expected
    assert text(raw_graph(inputs, [left_out, index], [4, 5])) == expected
    left_out["outputs"] *= 2
    left_out["fresh"] = 2
    with pytest.raises(IRError, match="has 2 fresh outputs, but returns 1"):
        from_raw(raw_graph(inputs, [left_out], [4]))


def test_an_output_that_was_resized_takes_over_no_buffer() -> None:
    raw = raw_graph(
        [layout(4), layout(0)],
        [raw_node("aten::neg.out", [edge(0), edge(1)], [layout(4)], mutated=(1,))],
        [2],
        [1],
    )
    assert (
        text(raw)
        == """\
graph(%0: f32[4], %1: f32[0]):
  %2: f32[4] = aten::neg.out(%0, out=%1)  # train.py:1
  return %2"""
    )


def test_devices_seeds_regions_and_unused_numbers() -> None:
    device = torch.device("privateuseone:0")
    raw = raw_graph(
        [],
        [
            raw_node(
                "aten::empty.memory_format",
                [const([3]), const(None), const(None), const(device), const(False), const(None)],
                [layout(3)],
            ),
            raw_node(
                "aten::uniform_",
                [edge(0), ("number", 0, 0.0), ("number", 1, 1.0), ("seed", 2, 77)],
                [layout(3)],
                mutated=(0,),
                line=2,
                region=4,
            ),
        ],
        [1],
        numbers=(0.0, 1.0, 77, True),
    )
    assert (
        text(raw)
        == """\
graph():
  unused $3=True
  %0: f32[3] = aten::empty.memory_format([3], device=here, pin_memory=False)  # train.py:1
  %1: f32[3] = aten::uniform_(%0, $0=0.0, $1=1.0, generator=$2=seed(77)) [region=4]  # train.py:2
  return %1"""
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "aten::nothing"}, "there is no operator 'aten::nothing'"),
        ({"args": [edge(0)]}, "aten::add_.Tensor has 1 arguments, its schema 3"),
        ({"args": [edge(7), edge(0), ONE]}, r"writes to values \[7\], but lists \[0\]"),
        ({"args": [edge(0), edge(7), ONE]}, "an argument is value 7, which no input or earlier node defines"),
        ({"args": [edge(0), ("thing", 1), ONE]}, "an argument of kind 'thing'"),
        ({"mutated": []}, r"writes to values \[0\], but lists \[\]"),
        ({"outputs": []}, "0 outputs for its 1 written storages"),
        ({"op": "aten::add.Tensor"}, "aten::add.Tensor writes 1 storages, but its schema writes none"),
    ],
)
def test_inconsistent_raw_graphs(change: dict[str, Any], message: str) -> None:
    node = raw_node("aten::add_.Tensor", [edge(0), edge(0), ONE], [layout(4)], mutated=(0,))
    with pytest.raises(IRError, match=message):
        from_raw(raw_graph([layout(4)], [node | change], [1]))
