"""Families of steps that differ in sizes only, and the templates that are guessed from examples of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tarry
from tarry.events import expect
from tarry.ir.raw import with_integers
from tarry.ir.sizes import Polynomial, fit
from tarry.native import C
from tarry.runtime.sizes.template import exemplary, find_template

USES_DEVICE = True


def outline(*tensors: torch.Tensor):  # type: ignore[no-untyped-def]
    return C.peek(list(tensors)).outline()


def layer(batch: int, length: int = 3, width: int = 8) -> torch.Tensor:
    x = torch.zeros(batch, length, width, device="tarry")
    w = torch.zeros(width, width, device="tarry")
    tarry.mark_step()
    joined = torch.cat([(x @ w).transpose(1, 2), x.transpose(1, 2)], dim=2)
    return joined.reshape(batch * width, 2 * length)[1:].sum(0)


def test_steps_of_other_sizes_have_the_same_outline() -> None:
    a, b, c = outline(layer(4)), outline(layer(5)), outline(layer(5) + 1)
    assert a.same(b)
    assert a.key == b.key
    assert a.integers != b.integers
    assert not a.same(c)


def test_constants_that_are_no_sizes_are_part_of_the_outline() -> None:
    x = torch.zeros(3, 4, device="tarry")
    tarry.mark_step()
    gelu = torch.nn.functional.gelu
    assert not outline(gelu(x)).same(outline(gelu(x, approximate="tanh")))
    assert not outline(x.sum(0)).same(outline(x.sum(0, keepdim=True)))
    assert not outline(x.to(torch.float64)).same(outline(x.to(torch.float16)))
    assert outline(x.sum(0)).same(outline(x.T.contiguous().sum(1))) is False


def test_numbers_are_no_part_of_the_outline() -> None:
    x = torch.zeros(3, device="tarry")
    tarry.mark_step()
    assert outline(x * 2.0).same(outline(x * 3.0))
    assert outline(x * 2.0).integers == outline(x * 3.0).integers
    assert not outline(x * 2.0).same(outline(x * 2))
    assert outline(torch.arange(5, device="tarry")).integers != outline(torch.arange(6, device="tarry")).integers


def test_a_raw_graph_can_be_written_for_other_integers() -> None:
    small, large = C.peek([layer(4)]), C.peek([layer(6)])
    assert with_integers(small.raw(), large.outline().integers) == large.raw()
    assert with_integers(small.raw(), small.outline().integers) == small.raw() != large.raw()


def test_a_template_takes_sizes_that_it_has_not_seen() -> None:
    two = [outline(layer(4)), outline(layer(6))]
    template = find_template([each.integers for each in two], two[0].ranks)
    assert template is not None
    assert len(template.symbols) == 1
    for size in (2, 3, 7, 100):
        assert template.match(outline(layer(size))) == (size,)
        assert template.integers((size,)) == outline(layer(size)).integers
    assert template.match(outline(layer(1))) is None  # sizes 0 and 1 broadcast
    assert template.match(outline(layer(4, length=5))) is None


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(2, 12), st.integers(2, 12)), min_size=3, max_size=4, unique=True),
    other=st.tuples(st.integers(2, 12), st.integers(2, 12)),
)
def test_what_a_template_matches_is_what_it_says(sizes: list[tuple[int, int]], other: tuple[int, int]) -> None:
    """Whatever was guessed from the examples: it never matches a step with an integer that it has wrong."""
    known = [outline(layer(*size)) for size in sizes]
    template = find_template([each.integers for each in known], known[0].ranks)
    if template is None:
        return
    for each in (*known, outline(layer(*other))):
        symbols = template.match(each)
        assert symbols is not None or each not in known
        if symbols is not None:
            assert template.integers(symbols) == each.integers


def test_two_dimensions_need_three_examples() -> None:
    known = [outline(layer(*size)) for size in ((4, 3), (6, 3), (6, 5))]
    template = find_template([each.integers for each in known], known[0].ranks)
    assert template is not None
    assert len(template.symbols) == 2
    assert template.match(outline(layer(9, 11))) is not None


def test_sizes_before_and_after_pooling_are_multiples() -> None:
    def pooled(size: int) -> torch.Tensor:
        x = torch.zeros(2, 3, size, size, device="tarry")
        tarry.mark_step()
        return torch.nn.functional.avg_pool2d(x, 2).flatten(1)

    known = [outline(pooled(size)) for size in (8, 12)]
    template = find_template([each.integers for each in known], known[0].ranks)
    assert template is not None
    assert template.match(outline(pooled(20))) == (10,)
    assert template.match(outline(pooled(21))) is None


@pytest.mark.parametrize(
    ("values", "examples", "text"),
    [
        ((7, 7), [(2,), (3,)], "7"),
        ((8, 12), [(2,), (3,)], "4*s0"),
        ((3, 4), [(2,), (3,)], "s0 + 1"),
        ((4, 9), [(2,), (3,)], "s0*s0"),
        ((10, 21), [(2, 5), (3, 7)], "s0*s1"),
        ((7, 10), [(2, 5), (3, 7)], "s0 + s1"),
        ((11, 14), [(2,), (3,)], "3*s0 + 5"),
        ((5, 8), [(2,), (4,)], None),
    ],
)
def test_the_simplest_polynomial_is_found(values: tuple[int, ...], examples: list[tuple[int, ...]], text: str) -> None:
    found = fit(values, examples)
    assert (str(found) if found else None) == text


def test_products_of_known_sizes_are_found() -> None:
    one_more = Polynomial.symbol(0) + Polynomial.constant(1)
    found = fit((5 * 6 * 8, 6 * 7 * 8), [(5,), (6,)], [one_more])
    assert found is not None
    assert found.at((10,)) == 10 * 11 * 8


def test_exemplary_sizes_have_nothing_in_common() -> None:
    known = [outline(layer(*size)) for size in ((4, 3), (6, 3), (6, 5))]
    template = find_template([each.integers for each in known], known[0].ranks)
    assert template is not None
    values = [value for example in exemplary(template, (11, 13), 4) for value in example]
    assert len(set(values)) == len(values) == 8
    assert not set(values) & {11, 13}


def test_the_reference_path_takes_any_size_as_the_same_step() -> None:
    """From the second size on, nothing is prepared and nothing kept."""

    def run(size: int) -> list[float]:
        result: list[float] = layer(size).tolist()
        return result

    run(4)
    with expect(compiles=0, cache_hits=6):
        run(5)
        run(6)
        run(7)
