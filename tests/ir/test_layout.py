"""Arithmetic on layouts against what PyTorch does to real tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tarry.ir.layout import (
    VIEW_RULES,
    Layout,
    TensorType,
    channels_last_strides,
    contiguous_strides,
    disjoint,
    extent,
    is_dense,
    is_injective,
    memory_order,
    view_layout,
)
from tarry.ir.operators import overload
from tests.ir.strategies import buffers, draw_views, sizes


def layout_of(x: torch.Tensor) -> Layout:
    return TensorType.of(x).at(x.storage_offset())


def addresses(x: Layout) -> list[int]:
    """Where every element lies, in order of its index."""
    found = [x.offset]
    for size, stride in zip(x.sizes, x.strides, strict=True):
        found = [base + k * stride for base in found for k in range(size)]
    return found


ARGS: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    "aten::permute": st.permutations(range(3)).map(lambda dims: (tuple(dims),)),
    "aten::view": st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), max_size=4).map(lambda s: (tuple(s),)),
    "aten::slice.Tensor": st.tuples(
        st.integers(0, 2), st.none() | st.integers(-5, 5), st.none() | st.integers(-5, 6), st.integers(1, 3)
    ),
    "aten::select.int": st.tuples(st.integers(0, 2), st.integers(-4, 4)),
    "aten::expand": st.tuples(st.lists(st.integers(1, 3), min_size=2, max_size=4).map(tuple), st.just(False)),
    "aten::unsqueeze": st.tuples(st.integers(0, 3)),
    "aten::squeeze.dim": st.tuples(st.integers(0, 2)),
    "aten::diagonal": st.tuples(st.integers(-3, 3), st.integers(0, 2), st.integers(0, 2)),
    "aten::as_strided": st.tuples(st.just((2, 2)), st.just((1, 3)), st.none() | st.integers(0, 3)),
    "aten::view.dtype": st.tuples(st.sampled_from([torch.int32, torch.int8, torch.float64, torch.float16])),
    "aten::view_as_real": st.just(()),
    "aten::view_as_complex": st.just(()),
}


def test_every_view_rule_is_tested() -> None:
    assert set(ARGS) == set(VIEW_RULES)


@given(st.data(), st.sampled_from(sorted(VIEW_RULES)))
def test_view_rules_are_those_of_pytorch(data: st.DataObject, op: str) -> None:
    x = draw_views(data.draw, data.draw(buffers()), 3)
    args = data.draw(ARGS[op])
    keywords = {"implicit": args[1]} if op == "aten::expand" else {}
    try:
        given_args = [list(arg) if isinstance(arg, tuple) else arg for arg in (args[:1] if keywords else args)]
        expected = overload(op)(x, *given_args, **keywords)
    except (RuntimeError, IndexError, TypeError):  # which of them depends on PyTorch's version
        expected = None
    mine = view_layout(op, layout_of(x), args)
    if expected is None:
        # PyTorch also refuses as_strided past the end of the storage, which is not a property of the layout.
        assert mine is None or op == "aten::as_strided"
    else:
        assert mine is not None
        if expected.numel() == 0:
            assert (mine.dtype, mine.sizes) == (expected.dtype, tuple(expected.shape))
        else:
            assert mine.matches(layout_of(expected))


@given(sizes)
def test_strides_of_memory_formats(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    assert contiguous_strides(shape) == x.stride()
    if len(shape) == 4:
        assert channels_last_strides(shape) == torch.empty(shape, memory_format=torch.channels_last).stride()
    else:
        assert channels_last_strides(shape) is None


@given(st.data())
def test_density_order_and_extent(data: st.DataObject) -> None:
    x = layout_of(draw_views(data.draw, data.draw(buffers()), 3))
    places = addresses(x)
    assert extent(x.sizes, x.strides) == (max(places) - min(places) + 1 if places else 0)
    assert is_dense(x.sizes, x.strides) == (len(set(places)) == len(places) == extent(x.sizes, x.strides))
    if is_injective(x.sizes, x.strides):
        assert len(set(places)) == len(places)
    order = memory_order(x.sizes, x.strides)
    assert sorted(order) == list(range(len(x.sizes)))
    moving = [x.strides[d] for d in order if x.sizes[d] > 1]
    assert moving == sorted(moving, reverse=True)
    if x.type.is_contiguous and 0 not in x.sizes:
        assert order == tuple(range(len(x.sizes)))


@given(st.data())
def test_disjoint_is_never_wrong(data: st.DataObject) -> None:
    base = data.draw(buffers(torch.float32))
    a = layout_of(draw_views(data.draw, base, 3))
    b = layout_of(draw_views(data.draw, base, 3))
    if disjoint(a, b):
        a_bytes = {place * a.dtype.itemsize + k for place in addresses(a) for k in range(a.dtype.itemsize)}
        b_bytes = {place * b.dtype.itemsize + k for place in addresses(b) for k in range(b.dtype.itemsize)}
        assert not a_bytes & b_bytes


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (lambda x: x[0], lambda x: x[1], True),  # rows
        (lambda x: x[:, 0], lambda x: x[:, 5], True),  # columns
        (lambda x: x[:, :4], lambda x: x[:, 4:], True),  # halves
        (lambda x: x[:, :5], lambda x: x[:, 4:], False),
        (lambda x: x[:, ::2], lambda x: x[:, 1::2], True),  # even and odd
        (lambda x: x[0, :4], lambda x: x.t()[4], True),
        (lambda x: x, lambda x: x[3:3], True),  # nothing
        (lambda x: x, lambda x: x, False),
    ],
)
def test_disjoint_settles_slices(a: Any, b: Any, expected: bool) -> None:
    x = torch.empty(4, 8)
    assert disjoint(layout_of(a(x)), layout_of(b(x))) is expected
    assert disjoint(layout_of(b(x)), layout_of(a(x))) is expected


@given(st.data())
def test_a_view_fits_the_buffer_it_was_made_from(data: st.DataObject) -> None:
    base = data.draw(buffers())
    view = layout_of(draw_views(data.draw, base, 3))
    assert view.fits(TensorType.of(base))
    if view.numel:
        beyond = math.ceil(TensorType.of(base).nbytes / view.dtype.itemsize)
        assert not Layout(view.dtype, view.sizes, view.strides, beyond).fits(TensorType.of(base))
