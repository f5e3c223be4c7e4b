"""Why a graph is another one, in one line."""

from __future__ import annotations

import pytest

from tarry.ir.difference import alike, difference
from tarry.ir.text import parse

OLD = """
graph(%0: f32[8, 64], %1: f32[64, 10]):
  %2: f32[8, 10] = aten::mm(%0, %1)  # train.py:31
  %3: f32[8, 10] = aten::mul.Tensor(%2, $0=wrapped(2.0))  # train.py:32
  %4: f32[8] = aten::sum.dim_IntList(%3, [1], False)  # train.py:33
  return %4
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"[8,": "[4,", "f32[8]": "f32[4]"}, "input f32[8, 64] is f32[4, 64] now (train.py:31)"),
        ({"%1: f32[64, 10]": "%1: f32[64, 10]{1, 64}"}, "input f32[64, 10] is f32[64, 10]{1, 64} now (train.py:31)"),
        ({"[1], False": "[-1], False"}, "dim of aten::sum.dim_IntList was [1] and is [-1] now (train.py:33)"),
        ({"wrapped(2.0)": "wrapped(2)"}, "other of aten::mul.Tensor was float 2.0 and is int 2 now (train.py:32)"),
        ({"$0=wrapped(2.0)": "%2"}, "other of aten::mul.Tensor was 2.0 and is a tensor now (train.py:32)"),
        ({"(%3, [1]": "(%2, [1]"}, "aten::sum.dim_IntList reads other values now (train.py:33)"),
        ({"return %4": "return %4, %3"}, "the result of aten::mul.Tensor is needed now (train.py:32)"),
        ({"return %4": "return %3"}, "the result of aten::mul.Tensor is needed now (train.py:32)"),
        ({"(%0: f32[8, 64], ": "(%0: f32[8, 64], %9: f32[1], "}, "input f32[64, 10] is f32[1] now"),
        ({"f32[64, 10]):": "f32[64, 10], %9: f32[1]):"}, "there are 3 inputs now, not 2 (train.py:31)"),
        ({"# train.py:32": "# other.py:1"}, None),
        ({"wrapped(2.0)": "wrapped(3.0)"}, None),
        ({}, None),
    ],
)
def test_the_first_difference(changes: dict[str, str], expected: str | None) -> None:
    new = OLD
    for old_text, new_text in changes.items():
        assert old_text in new
        new = new.replace(old_text, new_text)
    assert difference(parse(OLD), parse(new)) == expected


def test_other_operators_are_no_recompile() -> None:
    other = OLD.replace("aten::sum.dim_IntList", "aten::mean.dim")
    assert difference(parse(OLD), parse(other)) is None
    assert alike(parse(OLD)) != alike(parse(other))


def test_a_result_that_nobody_wants_any_more() -> None:
    more = OLD.replace("return %4", "return %4, %3")
    assert difference(parse(more), parse(OLD)) == "the result of aten::mul.Tensor is not needed any more (train.py:32)"


def test_where_a_result_goes() -> None:
    into = OLD.replace("return %4", "return %2, %4").replace("f32[8, 64]", "f32[8, 10]")
    assert (
        difference(parse(into), parse(into.replace("%2, %4", "%2 -> %0, %4")))
        == "results go to other tensors now (train.py:31)"
    )
