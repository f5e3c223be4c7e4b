"""Writing in place on TorchScript: which nodes may, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from tarry.backends.torchscript import TorchScriptBackend
from tarry.backends.torchscript.writes import plan_writes, writing_form
from tarry.errors import IRError
from tarry.ir.build import from_raw
from tarry.ir.evaluate import evaluate
from tarry.ir.graph import Graph
from tarry.ir.text import parse
from tarry.passes.donation import safe_updates
from tarry.passes.pipeline import run
from tests.backends.test_torchscript import _same_as_evaluate
from tests.ir.raw import same_bits
from tests.ir.strategies import draw_program

USES_DEVICE = True
pytestmark = pytest.mark.usefixtures("torchscript")


def _planned(graph: Graph) -> list[str]:
    return [graph.nodes[k].op for k in sorted(plan_writes(graph).nodes)]


def test_writing_forms_are_the_inverse_of_functional_ones() -> None:
    found = writing_form("aten::_foreach_add.List")
    assert found is not None
    assert found.op == "aten::_foreach_add_.List"
    batch_norm = writing_form("aten::_native_batch_norm_legit_functional")
    assert batch_norm is not None
    assert batch_norm.op == "aten::_native_batch_norm_legit"
    assert writing_form("aten::mm") is None
    assert writing_form("aten::bernoulli.p") is None  # would draw in the order of other strides


_UPDATE = """graph(%0: f32[4], %1: f32[4], %2: f32[4]):
  %3: f32[4] = aten::mul.Tensor(%1, $0=wrapped(0.9))
  %4: f32[4] = aten::add.Tensor(%3, %2, alpha=1)
  %5: f32[4] = aten::add.Tensor(%0, %4, alpha=-0.1)
  return %4 -> %1, %5 -> %0
"""


def test_a_chain_of_updates_is_written_into_its_input() -> None:
    parameter, momentum, gradient = torch.randn(4), torch.randn(4), torch.randn(4)
    expected = evaluate(parse(_UPDATE), [parameter, momentum, gradient])
    graph = parse(_UPDATE)
    made = TorchScriptBackend().compile(graph)
    assert made.in_place == {0, 1}
    assert made.run([parameter, momentum, gradient], [0.9]) == [None, None]
    torch.testing.assert_close([momentum, parameter], expected, rtol=0, atol=0)


def test_an_input_that_is_read_later_is_not_overwritten() -> None:
    text = """graph(%0: f32[4], %1: f32[4]):
  %2: f32[4] = aten::add.Tensor(%0, %1, alpha=1)
  %3: f32[2, 2] = aten::view(%0, [2, 2])
  %4: f32[2, 2] = aten::exp(%3)
  return %2 -> %0, %4
"""
    graph = parse(text)
    assert plan_writes(graph).outputs == frozenset()
    x, y = torch.randn(4), torch.randn(4)
    before = x.clone()
    _same_as_evaluate(text, x, y)
    assert torch.equal(x, before)


def test_nothing_is_overwritten_before_something_may_fail() -> None:
    text = """graph(%0: f32[4], %1: f32[4], %2: i64[1]):
  %3: f32[4] = aten::mul.Tensor(%0, %1)
  %4: f32[1] = aten::index_select(%1, 0, %2)
  %5: f32[4] = aten::add.Tensor(%3, %4, alpha=1)
  return %5 -> %0
"""
    graph = parse(text)
    assert plan_writes(graph).outputs == frozenset()
    early = replace(graph, nodes=(graph.nodes[1], graph.nodes[0], graph.nodes[2]))
    assert plan_writes(early).outputs == {0}


def test_half_a_chain_is_not_begun() -> None:
    """%0 may not be written by the first node unless the second writes there as well, and it cannot: %3 is returned."""
    graph = parse("""graph(%0: f32[4], %1: f32[4]):
  %2: f32[4] = aten::exp(%1)
  %3: f32[4] = aten::add.Tensor(%0, %2, alpha=1)
  %4: f32[4] = aten::mul.Tensor(%3, %2)
  return %3, %4 -> %0
""")
    assert plan_writes(graph).outputs == frozenset()
    assert _planned(graph) == []


def test_a_list_is_written_as_a_whole_or_not_at_all() -> None:
    text = """graph(%0: f32[4], %1: f32[4], %2: f32[4]):
  (%3: f32[4], %4: f32[4]) = aten::_foreach_add.List([%0, %1], [%2, %2], alpha=1)
  %5: f32[4] = aten::neg(%{last})
  return %3 -> %0, %4 -> %1, %5
"""
    assert plan_writes(parse(text.format(last=2))).outputs == {0, 1}
    assert plan_writes(parse(text.format(last=0))).outputs == frozenset()  # the old %0 is still wanted


def test_temporaries_are_written_in_place_only_if_they_own_their_buffer() -> None:
    dump = _same_as_evaluate(
        """graph(%0: f32[2, 4], %1: f32[4]):
  %2: f32[2, 4] = aten::mul.Tensor(%0, %1)
  %3: f32[2, 4] = aten::relu(%2)
  %4: f32[4, 2]{1, 4} = aten::permute(%3, [1, 0])
  %5: f32[2, 4] = aten::exp(%3)
  %6: f32[4, 2]{1, 4} = aten::neg(%4)
  return %5, %6
""",
        torch.randn(2, 4),
        torch.randn(4),
    )
    assert "aten::relu_(" in dump
    assert "aten::exp(" in dump  # its operand is seen through a window later
    assert "aten::neg_(" in dump


def test_a_scatter_into_a_dead_buffer_is_a_copy_into_a_window() -> None:
    dump = _same_as_evaluate(
        """graph(%0: f32[4, 3], %1: f32[2, 3], %2: f32[3]):
  %3: f32[4, 3] = aten::exp(%0)
  %4: f32[4, 3] = aten::slice_scatter(%3, %1, 0, 1, 3, 1)
  %5: f32[4, 3] = aten::select_scatter(%4, %2, 0, 3)
  return %5
""",
        torch.randn(4, 3),
        torch.randn(2, 3),
        torch.randn(3),
    )
    assert "scatter" not in dump
    assert dump.count("aten::copy_") == 2


def _check_program(data: st.DataObject, most: int) -> None:
    recorder = draw_program(data.draw, most)
    try:
        graph = safe_updates(run(from_raw(recorder.raw())))
    except IRError:  # a matter of the passes, which have tests of their own
        reject()
    given_inputs = recorder.inputs()
    expected = evaluate(graph, given_inputs)
    inputs = [_copy(tensor) for tensor in given_inputs]
    made = TorchScriptBackend().compile(graph)
    actual = list(made.run(inputs, [number.value for number in graph.numbers]))
    overwritten = {}
    for k in made.in_place:
        replaced = graph.replaces[k]
        assert replaced is not None
        actual[k] = overwritten[replaced] = inputs[replaced]
    for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert same_bits(a.contiguous(), e.contiguous()), f"output {k} of\n{graph}\nby\n{made.backend_text}"
    for k, (after, before) in enumerate(zip(inputs, given_inputs, strict=True)):
        assert k in overwritten or same_bits(after, before), f"input {k} of\n{graph}\nby\n{made.backend_text}"


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


@settings(max_examples=40)
@given(st.data())
def test_programs_of_views_and_writes(data: st.DataObject) -> None:
    _check_program(data, 6)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_programs_of_views_and_writes_at_length(data: st.DataObject) -> None:
    _check_program(data, 12)
