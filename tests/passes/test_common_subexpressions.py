"""What is merged, and above all what is not."""

from __future__ import annotations

import pytest

from tarry.ir import parse
from tarry.passes import merge_common_subexpressions


def merged(body: str) -> list[str]:
    """The operators that are left of a graph whose outputs are all values of its nodes."""
    lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
    graph = parse(f"graph(%0: f32[4, 4], %1: f32[4, 4]):\n{lines}\n  return %2, %3")
    return [node.op for node in merge_common_subexpressions(graph).nodes]


SAME = [
    ("equal nodes", "%2: f32[4, 4] = aten::mul.Tensor(%0, %1)\n%3: f32[4, 4] = aten::mul.Tensor(%0, %1)"),
    ("other sites", "%2: f32[4, 4] = aten::neg(%0)  # a.py:1\n%3: f32[4, 4] = aten::neg(%0)  # a.py:2"),
    ("one number", "%2: f32[4, 4] = aten::mul.Scalar(%0, $0=2.0)\n%3: f32[4, 4] = aten::mul.Scalar(%0, $0=2.0)"),
    ("constants", "%2: f32[4, 4] = aten::mul.Scalar(%0, 2.0)\n%3: f32[4, 4] = aten::mul.Scalar(%0, 2.0)"),
    ("one region", "%2: f32[4, 4] = aten::neg(%0) [region=1]\n%3: f32[4, 4] = aten::neg(%0) [region=1]"),
    (
        "views of two regions",
        "%2: f32[4] = aten::select.int(%0, 0, 1)\n%3: f32[4] = aten::select.int(%0, 0, 1) [region=1]",
    ),
    (
        "one seed",
        (
            "%2: f32[4, 4] = aten::uniform(%0, 0.0, 1.0, generator=$0=seed(5))\n"
            "%3: f32[4, 4] = aten::uniform(%0, 0.0, 1.0, generator=$0=seed(5))"
        ),
    ),
    ("a writing operator", "%2: f32[4, 4] = aten::neg_(%0)\n%3: f32[4, 4] = aten::neg_(%0)"),
]
DIFFERENT = [
    (
        "operands",
        "%2: f32[4, 4] = aten::sub.Tensor(%0, %1, alpha=1)\n%3: f32[4, 4] = aten::sub.Tensor(%1, %0, alpha=1)",
    ),
    ("numbers", "%2: f32[4, 4] = aten::mul.Scalar(%0, $0=2.0)\n%3: f32[4, 4] = aten::mul.Scalar(%0, $1=2.0)"),
    (
        "a number and a constant",
        "%2: f32[4, 4] = aten::mul.Scalar(%0, $0=2.0)\n%3: f32[4, 4] = aten::mul.Scalar(%0, 2.0)",
    ),
    ("types of constants", "%2: f32[4, 4] = aten::mul.Scalar(%0, 1)\n%3: f32[4, 4] = aten::mul.Scalar(%0, True)"),
    ("zeros", "%2: f32[4, 4] = aten::mul.Scalar(%0, 0.0)\n%3: f32[4, 4] = aten::mul.Scalar(%0, -0.0)"),
    (
        "seeds apart from the arguments",
        (
            "(%2: f32[4, 4], %4: b8[4, 4]) = aten::native_dropout(%0, 0.5, True) [$0=seed(5)]\n"
            "(%3: f32[4, 4], %5: b8[4, 4]) = aten::native_dropout(%0, 0.5, True) [$1=seed(5)]"
        ),
    ),
    ("recomputation", "%2: f32[4, 4] = aten::neg(%0)\n%3: f32[4, 4] = aten::neg(%0) [region=1]"),
    ("two recomputations", "%2: f32[4, 4] = aten::neg(%0) [region=2]\n%3: f32[4, 4] = aten::neg(%0) [region=1]"),
    ("strides", "%2: f32[4, 4] = aten::neg(%0)\n%3: f32[4, 4]{1, 4} = aten::neg(%0)"),
    (
        "seeds",
        (
            "%2: f32[4, 4] = aten::uniform(%0, 0.0, 1.0, generator=$0=seed(5))\n"
            "%3: f32[4, 4] = aten::uniform(%0, 0.0, 1.0, generator=$1=seed(5))"
        ),
    ),
    (
        "no seed",
        "%2: f32[4, 4] = aten::uniform(%0, 0.0, 1.0)\n%3: f32[4, 4] = aten::uniform(%0, 0.0, 1.0)",
    ),
]


@pytest.mark.parametrize("body", [case[1] for case in SAME], ids=[case[0] for case in SAME])
def test_merged(body: str) -> None:
    assert len(merged(body)) == 1


@pytest.mark.parametrize("body", [case[1] for case in DIFFERENT], ids=[case[0] for case in DIFFERENT])
def test_not_merged(body: str) -> None:
    assert len(merged(body)) == 2


def test_chains_are_merged() -> None:
    assert merged("""
        %4: f32[4, 4] = aten::neg(%0)
        %5: f32[4, 4] = aten::neg(%0)
        %2: f32[4, 4] = aten::exp(%4)
        %3: f32[4, 4] = aten::exp(%5)
    """) == ["aten::neg", "aten::exp"]


def test_a_recomputed_chain_stays_apart_even_where_it_starts_from_the_same_value() -> None:
    assert merged("""
        %4: f32[4, 4] = aten::neg(%0)
        %2: f32[4, 4] = aten::exp(%4)
        %5: f32[4, 4] = aten::neg(%0) [region=1]
        %3: f32[4, 4] = aten::exp(%5) [region=1]
    """) == ["aten::neg", "aten::exp", "aten::neg", "aten::exp"]
