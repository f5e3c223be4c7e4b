"""The reference evaluator itself."""

from __future__ import annotations

import pytest
import torch

from tarry.errors import IRError
from tarry.ir import evaluate, parse
from tarry.ir.evaluate import drawing_from
from tests.ir.raw import same_bits


def test_written_arguments_are_not_touched() -> None:
    graph = parse("""
graph(%0: f32[4], %1: f32[4]):
  %2: f32[4] = aten::add_.Tensor(%0, %1, alpha=$0=2)
  %3: f32[4] = aten::sub.Tensor(%0, %2, alpha=1)
  return %2, %3
""")
    x, y = torch.ones(4), torch.arange(4.0)
    new, difference = evaluate(graph, [x, y])
    assert new.tolist() == [1, 3, 5, 7]
    assert difference.tolist() == [0, -2, -4, -6]
    assert x.tolist() == [1, 1, 1, 1]
    assert evaluate(graph, [x, y], [10])[0].tolist() == [1, 11, 21, 31]


def test_a_seed_gives_the_same_numbers_every_time() -> None:
    graph = parse("""
graph(%0: f32[4]):
  %1: f32[4] = aten::uniform_(%0, 0.0, 1.0, generator=$0=seed(5))
  %2: f32[4] = aten::uniform_(%0, 0.0, 1.0, generator=$1=seed(5))
  return %1, %2
""")
    expected = torch.empty(4).uniform_(generator=torch.Generator().manual_seed(5))
    first, second = evaluate(graph, [torch.empty(4)])
    assert same_bits(first, expected)
    assert same_bits(second, expected)
    assert not same_bits(evaluate(graph, [torch.empty(4)], [5, 6])[1], expected)


def test_seeds_may_be_positions_of_generators() -> None:
    graph = parse("""
graph(%0: f32[4]):
  %1: f32[4] = aten::uniform_(%0, 0.0, 1.0, generator=$0=seed(5))
  %2: f32[4] = aten::uniform_(%0, 0.0, 1.0, generator=$1=seed(5))
  return %1, %2
""")
    with drawing_from([torch.Generator().manual_seed(seed) for seed in (8, 9)]):
        made = evaluate(graph, [torch.zeros(4)], [1, 0])
    expected = [torch.empty(4).uniform_(generator=torch.Generator().manual_seed(seed)) for seed in (9, 8)]
    torch.testing.assert_close(made, expected, rtol=0, atol=0)


def test_a_seed_of_an_operator_without_a_generator() -> None:
    graph = parse("""
graph(%0: f32[40]):
  (%1: f32[40], %2: b8[40]) = aten::native_dropout(%0, 0.5, True) [$0=seed(5)]
  return %2
""")
    before = torch.get_rng_state()
    (mask,) = evaluate(graph, [torch.ones(40)])
    assert torch.equal(torch.get_rng_state(), before)
    assert same_bits(mask, evaluate(graph, [torch.ones(40)])[0])
    assert not same_bits(mask, evaluate(graph, [torch.ones(40)], [6])[0])


def test_numbers_promote_as_in_a_program() -> None:
    graph = parse("""
graph(%0: bf16[2], %1: i32[2]):
  %2: bf16[2] = aten::add.Tensor(%0, $0=wrapped(2.0), alpha=1)
  %3: f32[2] = aten::mul.Tensor(%1, $1=wrapped(0.5))
  return %2, %3
""")
    assert [x.dtype for x in evaluate(graph, [torch.ones(2).bfloat16(), torch.ones(2).int()])] == [
        torch.bfloat16,
        torch.float32,
    ]


def test_results_come_in_the_strides_of_their_types() -> None:
    graph = parse("""
graph(%0: f32[2, 3]):
  %1: f32[2, 3]{1, 2} = aten::neg(%0)
  %2: f32[6] = tarry::strided_view(%1, f32, [6], [1], 0)
  return %1, %2
""")
    negated, flat = evaluate(graph, [torch.arange(6.0).view(2, 3)])
    assert negated.stride() == (1, 2)
    assert flat.tolist() == [0, -3, -1, -4, -2, -5]


def test_windows_on_views_and_on_other_dtypes() -> None:
    graph = parse("""
graph(%0: f32[4, 2]):
  %1: f32[2] = aten::select.int(%0, 0, 1)
  %2: f32[] = tarry::strided_view(%1, f32, [], [], 1)
  %3: c64[] = tarry::strided_view(%1, c64, [], [], 0)
  %4: f32[4, 2] = tarry::strided_scatter(%0, %3, c64, [], [], 3)
  return %2, %3, %4
""")
    x = torch.arange(8.0).view(4, 2)
    element, pair, scattered = evaluate(graph, [x])
    assert element.item() == 3
    assert pair.item() == 2 + 3j
    assert scattered.flatten().tolist() == [0, 1, 2, 3, 4, 5, 2, 3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("%1: f32[3] = aten::neg(%0)", r"got f32\[4\] for %1"),
        ("%1: f64[4] = aten::neg(%0)", r"got f32\[4\] for %1"),
        ("%1: f32[4]{0} = aten::neg(%0)", "overlapping"),
        ("%1: f32[4] = tarry::strided_view(%0, f32, [4], [1], 1)", "reaches past the 16 bytes"),
    ],
)
def test_a_type_that_is_not_kept_is_an_error(body: str, message: str) -> None:
    with pytest.raises(IRError, match=message):
        evaluate(parse(f"graph(%0: f32[4]):\n  {body}\n  return %1"), [torch.zeros(4)])


def test_inputs_have_to_fit() -> None:
    graph = parse("graph(%0: f32[4]):\n  return %0")
    with pytest.raises(IRError, match="1 inputs, 0 were given"):
        evaluate(graph, [])
    with pytest.raises(IRError, match=r"input %0 is f32\[5\], not f32\[4\]"):
        evaluate(graph, [torch.zeros(5)])
