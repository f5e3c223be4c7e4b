"""Recovery of view operators: the typical ones by exact text, all of them by bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tarry.ir import Graph, GraphBuilder, Layout, TensorType, evaluate, parse, to_text, verify
from tarry.ir.layout import is_injective
from tarry.ir.operators import STRIDED_SCATTER, STRIDED_VIEW
from tarry.passes import eliminate_dead_code, recover_views
from tarry.passes.view_plan import plan_view
from tests.ir.raw import same_bits
from tests.ir.strategies import buffers, draw_views

View = Callable[[torch.Tensor], torch.Tensor]


def window(view: torch.Tensor) -> Layout:
    return TensorType.of(view).at(view.storage_offset())


def reading(base: torch.Tensor, view: torch.Tensor) -> Graph:
    builder = GraphBuilder()
    value = builder.input(TensorType.of(base))
    seen = window(view)
    args = (value, seen.dtype, seen.sizes, seen.strides, seen.offset)
    return builder.finish([builder.one(STRIDED_VIEW, args, seen.type)])


def writing(base: torch.Tensor, view: torch.Tensor, source: TensorType) -> Graph:
    builder = GraphBuilder()
    value, new = builder.input(TensorType.of(base)), builder.input(source)
    seen = window(view)
    args = (value, new, seen.dtype, seen.sizes, seen.strides, seen.offset)
    return builder.finish([builder.one(STRIDED_SCATTER, args, value.type)])


def recovered(graph: Graph) -> Graph:
    result = eliminate_dead_code(recover_views(graph))
    verify(result, "views", thorough=True)
    assert [value.type for value in result.outputs] == [value.type for value in graph.outputs]
    return result


def body(graph: Graph) -> list[str]:
    """The operators of a graph with their arguments, without values and types."""
    return [line.strip().partition(" = ")[2] for line in to_text(graph).splitlines()[1:-1]]


READS: list[tuple[str, View, list[str]]] = [
    ("itself", lambda x: x, []),
    ("t", lambda x: x.t(), ["aten::permute(%0, [1, 0])"]),
    ("row", lambda x: x[1], ["aten::select.int(%0, 0, 1)"]),
    ("column", lambda x: x[:, 3], ["aten::select.int(%0, 1, 3)"]),
    ("element", lambda x: x[1, 3], ["aten::select.int(%0, 0, 1)", "aten::select.int(%1, 0, 3)"]),
    ("rows", lambda x: x[1:3], ["aten::slice.Tensor(%0, 0, 1, 3, 1)"]),
    ("one column", lambda x: x[:, 3:4], ["aten::slice.Tensor(%0, 1, 3, 4, 1)"]),
    ("even columns", lambda x: x[:, ::2], ["aten::slice.Tensor(%0, 1, 0, 8, 2)"]),
    ("block", lambda x: x[1:3, 2:5], ["aten::slice.Tensor(%0, 0, 1, 3, 1)", "aten::slice.Tensor(%1, 1, 2, 5, 1)"]),
    ("flat", lambda x: x.view(32), ["aten::view(%0, [32])"]),
    ("split", lambda x: x.view(4, 2, 4), ["aten::view(%0, [4, 2, 4])"]),
    (
        "heads",
        lambda x: x.view(4, 2, 4).transpose(0, 1),
        ["aten::view(%0, [4, 2, 4])", "aten::permute(%1, [1, 0, 2])"],
    ),
    ("flat part", lambda x: x[1:3].view(16), ["aten::view(%0, [32])", "aten::slice.Tensor(%1, 0, 8, 24, 1)"]),
    ("unsqueeze", lambda x: x.unsqueeze(1), ["aten::view(%0, [4, 1, 8])"]),
    ("row, unsqueezed", lambda x: x[1].unsqueeze(1), ["aten::select.int(%0, 0, 1)", "aten::unsqueeze(%1, 1)"]),
    (
        "batches",
        lambda x: x.expand(3, 4, 8),
        ["aten::expand(%0, [3, 4, 8], implicit=False)"],
    ),
    (
        "expanded row",
        lambda x: x[1].unsqueeze(0).expand(4, 8),
        ["aten::select.int(%0, 0, 1)", "aten::expand(%1, [4, 8], implicit=False)"],
    ),
    ("diagonal", lambda x: x.diagonal(), ["aten::diagonal(%0, 0, 0, 1)"]),
    ("lower diagonal", lambda x: x.diagonal(-1), ["aten::diagonal(%0, -1, 0, 1)"]),
    ("bits", lambda x: x.view(torch.int32), ["aten::view.dtype(%0, i32)"]),
    ("bytes", lambda x: x.view(torch.uint8), ["aten::view.dtype(%0, u8)"]),
    (
        "complex",
        lambda x: torch.view_as_complex(x.view(4, 4, 2)),
        ["aten::view(%0, [4, 4, 2])", "aten::view_as_complex(%1)"],
    ),
    ("windows", lambda x: x.view(32).unfold(0, 4, 2), ["aten::as_strided(%0, [15, 4], [2, 1], 0)"]),
]


@pytest.mark.parametrize(("view", "expected"), [case[1:] for case in READS], ids=[case[0] for case in READS])
def test_views_of_a_matrix(view: View, expected: list[str]) -> None:
    base = torch.arange(32.0).view(4, 8)
    graph = recovered(reading(base, view(base)))
    assert body(graph) == expected
    assert same_bits(evaluate(graph, [base])[0], view(base))


WRITES: list[tuple[str, View, list[str]]] = [
    ("all", lambda x: x, []),
    ("t", lambda x: x.t(), ["aten::permute(%1, [1, 0])"]),
    ("flat", lambda x: x.view(32), ["aten::view(%1, [4, 8])"]),
    ("row", lambda x: x[1], ["aten::select_scatter(%0, %1, 0, 1)"]),
    ("rows", lambda x: x[1:3], ["aten::slice_scatter(%0, %1, 0, 1, 3, 1)"]),
    ("column of t", lambda x: x.t()[:, 1], ["aten::select_scatter(%0, %1, 0, 1)"]),
    (
        "block",
        lambda x: x[1:3, 2:5],
        [
            "aten::slice.Tensor(%0, 0, 1, 3, 1)",
            "aten::slice_scatter(%2, %1, 1, 2, 5, 1)",
            "aten::slice_scatter(%0, %3, 0, 1, 3, 1)",
        ],
    ),
    ("diagonal", lambda x: x.diagonal(1), ["aten::diagonal_scatter(%0, %1, 1, 0, 1)"]),
    ("bits", lambda x: x.view(torch.int32), ["aten::view.dtype(%1, f32)"]),
    ("nothing", lambda x: x[2:2], []),
    (
        "expanded row",
        lambda x: x[1].expand(3, 8),
        ["aten::select.int(%1, 0, 0)", "aten::select_scatter(%0, %2, 0, 1)"],
    ),
]


@pytest.mark.parametrize(("view", "expected"), [case[1:] for case in WRITES], ids=[case[0] for case in WRITES])
def test_writes_into_a_matrix(view: View, expected: list[str]) -> None:
    base = torch.arange(32.0).view(4, 8)
    # As computed from the view itself: dense, its dimensions in the order of the view's strides.
    source = (view(base) + 100).to(view(base).dtype)
    graph = recovered(writing(base, view(base), TensorType.of(source)))
    assert body(graph) == expected
    wanted = base.clone()
    if is_injective(tuple(source.shape), view(base).stride()):
        view(wanted).copy_(source)
    else:
        source = view(wanted).fill_(7).clone()
    assert same_bits(evaluate(graph, [base, source])[0], wanted)


def test_a_whole_write_in_other_strides_is_copied_into_the_strides_of_the_base() -> None:
    base, source = torch.zeros(4, 8), torch.arange(32.0).view(8, 4)
    graph = recovered(writing(base, base.t(), TensorType.of(source)))
    assert body(graph) == ["aten::permute(%1, [1, 0])", "aten::clone(%2, memory_format=contiguous_format)"]
    assert same_bits(evaluate(graph, [base, source])[0], source.t())


def test_channels_last_stays_channels_last() -> None:
    base = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert body(recovered(reading(base, base[:, 1]))) == ["aten::select.int(%0, 1, 1)"]
    assert body(recovered(reading(base, base[1:, :, 1:3]))) == [
        "aten::slice.Tensor(%0, 0, 1, 2, 1)",
        "aten::slice.Tensor(%1, 2, 1, 3, 1)",
    ]
    graph = recovered(writing(base, base, TensorType.contiguous(torch.float32, (2, 3, 4, 5))))
    assert body(graph) == ["aten::clone(%1, memory_format=channels_last)"]


@given(st.data())
@settings(max_examples=300)
def test_reads_of_random_views(data: st.DataObject) -> None:
    base = data.draw(buffers())
    view = draw_views(data.draw, base, 5)
    graph = recovered(reading(base, view))
    assert same_bits(evaluate(graph, [base])[0], view)


@given(st.data())
@settings(max_examples=300)
def test_writes_through_random_views(data: st.DataObject) -> None:
    base = data.draw(buffers())
    view = draw_views(data.draw, base, 4, injective=True)
    order = data.draw(st.permutations(range(view.dim())))  # the source may have any strides
    source = (
        torch.zeros(view.shape, dtype=view.dtype)
        .permute(order)
        .contiguous()
        .permute([list(order).index(d) for d in range(view.dim())])
    )
    graph = recovered(writing(base, view, TensorType.of(source)))
    wanted = base.clone(memory_format=torch.preserve_format)
    buffer = torch.empty(0, dtype=view.dtype).set_(wanted.untyped_storage())
    if view.numel():
        buffer.as_strided(view.size(), view.stride(), view.storage_offset()).copy_(source)
    assert same_bits(evaluate(graph, [base, source])[0], wanted)


@given(st.data())
@settings(max_examples=200)
def test_views_that_are_slices_and_permutations_need_no_as_strided(data: st.DataObject) -> None:
    """Everything but overlapping windows and odd reinterpretations has a chain of its own."""
    base = data.draw(buffers(torch.uint8))
    view = draw_views(data.draw, base, 3, injective=True, diagonal=False)
    if view.numel() and is_injective(tuple(view.shape), view.stride()):
        steps = plan_view(TensorType.of(base).at(), window(view))
        assert steps is not None
        assert all(step.op != "aten::as_strided" for step in steps)


def test_a_read_of_what_was_just_written_is_what_was_written() -> None:
    graph = parse("""
graph(%0: f32[4, 8], %1: f32[8]):
  %2: f32[4, 8] = tarry::strided_scatter(%0, %1, f32, [8], [1], 8)
  %3: f32[8] = tarry::strided_view(%2, f32, [8], [1], 8)
  %4: f32[8] = tarry::strided_view(%2, f32, [8], [1], 16)
  %5: f32[8] = aten::add.Tensor(%3, %4, alpha=1)
  return %5
""")
    assert (
        to_text(recovered(graph))
        == """\
graph(%0: f32[4, 8], %1: f32[8]):
  %2: f32[8] = aten::select.int(%0, 0, 2)
  %3: f32[8] = aten::add.Tensor(%1, %2, alpha=1)
  return %3"""
    )


def test_a_read_that_meets_a_write_in_part_sees_the_write() -> None:
    graph = parse("""
graph(%0: f32[4, 8], %1: f32[8]):
  %2: f32[4, 8] = tarry::strided_scatter(%0, %1, f32, [8], [1], 8)
  %3: f32[4]{8} = tarry::strided_view(%2, f32, [4], [8], 2)
  return %3
""")
    assert body(recovered(graph)) == ["aten::select_scatter(%0, %1, 0, 1)", "aten::select.int(%2, 1, 2)"]


def test_as_strided_counts_from_the_start_of_a_buffer() -> None:
    """The base is itself a window on a bigger buffer, which as_strided would count from the start of."""
    graph = parse("""
graph(%0: f32[4, 8]):
  %1: f32[8] = tarry::strided_view(%0, f32, [8], [1], 8)
  %2: f32[3, 4]{2, 1} = tarry::strided_view(%1, f32, [3, 4], [2, 1], 0)
  return %2
""")
    result = recovered(graph)
    assert body(result) == [
        "aten::select.int(%0, 0, 1)",
        "aten::clone(%1)",
        "aten::as_strided(%2, [3, 4], [2, 1], 0)",
    ]
    base = torch.arange(32.0).view(4, 8)
    assert same_bits(evaluate(result, [base])[0], base[1].unfold(0, 4, 2))


def test_gaps_between_elements_survive_a_write() -> None:
    """A base whose strides leave gaps: nothing but its own buffer has such strides."""
    base = torch.arange(12.0).as_strided((3, 2), (4, 1))
    for view in (base, base.t(), base[1], base[:, 1]):
        source = torch.full(view.shape, 50.0)
        graph = recovered(writing(base, view, TensorType.of(source)))
        expected = torch.arange(12.0).as_strided((3, 2), (4, 1))
        expected.as_strided(view.size(), view.stride(), view.storage_offset()).copy_(source)
        (result,) = evaluate(graph, [base, source])
        assert same_bits(result, expected)
        assert result.stride() == (4, 1)
