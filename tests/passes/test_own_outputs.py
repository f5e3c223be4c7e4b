"""Outputs with buffers of their own."""

from __future__ import annotations

from tarry.ir import parse, to_text, verify
from tarry.passes import own_outputs


def test_outputs_that_share_are_copied() -> None:
    graph = parse("""
graph(%0: f32[4, 8]):
  %1: f32[4, 8] = aten::neg(%0)  # a.py:1
  %2: f32[8] = aten::select.int(%1, 0, 0)  # a.py:2
  %3: f32[4, 8] = aten::exp(%0)
  %4: f32[8, 4]{1, 8} = aten::permute(%3, [1, 0])
  return %0, %1, %1, %2, %4
""")
    result = own_outputs(graph)
    verify(result, "optimized")
    assert (
        to_text(result)
        == """\
graph(%0: f32[4, 8]):
  %1: f32[4, 8] = aten::neg(%0)  # a.py:1
  %2: f32[8] = aten::select.int(%1, 0, 0)  # a.py:2
  %3: f32[4, 8] = aten::exp(%0)
  %4: f32[8, 4]{1, 8} = aten::permute(%3, [1, 0])
  %5: f32[4, 8] = aten::clone(%0)
  %6: f32[4, 8] = aten::clone(%1)  # a.py:1
  %7: f32[8] = aten::clone(%2)  # a.py:2
  return %5, %1, %6, %7, %4"""
    )


def test_nothing_to_do() -> None:
    graph = parse("graph(%0: f32[4]):\n  %1: f32[4] = aten::neg(%0)\n  return %1 -> %0")
    assert own_outputs(graph) is graph
