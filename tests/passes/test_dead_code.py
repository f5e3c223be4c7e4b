"""What no output needs goes."""

from __future__ import annotations

from tarry.ir import parse, to_text
from tarry.passes import eliminate_dead_code


def test_chains_that_reach_no_output_go_random_ones_too() -> None:
    graph = parse("""
graph(%0: f32[4], %1: f32[4]):
  %2: f32[4] = aten::neg(%1)
  %3: f32[4] = aten::exp(%2)
  %4: f32[4] = aten::uniform(%0, 0.0, 1.0, generator=$0=seed(5))
  (%5: f32[], %6: i64[]) = aten::max.dim(%0, 0, False)
  %7: f32[4] = aten::mul.Scalar(%0, $1=2.0)
  return %6, %7
""")
    assert (
        to_text(eliminate_dead_code(graph))
        == """\
graph(%0: f32[4], %1: f32[4]):
  unused $0=seed(5)
  (%2: f32[], %3: i64[]) = aten::max.dim(%0, 0, False)
  %4: f32[4] = aten::mul.Scalar(%0, $1=2.0)
  return %3, %4"""
    )


def test_a_graph_without_dead_code_stays_as_it_is() -> None:
    graph = parse("graph(%0: f32[4]):\n  %1: f32[4] = aten::neg(%0)\n  return %1 -> %0")
    assert eliminate_dead_code(graph) is graph


def test_an_update_that_is_overwritten_goes() -> None:
    graph = parse("""
graph(%0: f32[4]):
  %1: f32[4] = aten::add_.Tensor(%0, $0=wrapped(1), alpha=1)
  %2: f32[4] = aten::full([4], 0.0, dtype=f32, device=here)
  return %2 -> %0
""")
    assert [node.op for node in eliminate_dead_code(graph).nodes] == ["aten::full"]
