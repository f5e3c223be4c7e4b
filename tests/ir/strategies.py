"""Random views and random programs, drawn by hypothesis."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.ir.raw import Recorder

DTYPES = [torch.float32, torch.int32, torch.complex64, torch.float16, torch.uint8]

sizes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def buffers(draw: st.DrawFn, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor that fills its storage, contiguous or with its dimensions permuted. Every element is different."""
    chosen = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    shape = draw(sizes)
    order = draw(st.permutations(range(len(shape))))
    count = 1
    for size in shape:
        count *= size
    flat = torch.arange(1, count + 1).to(chosen)
    return flat.view([shape[d] for d in order]).permute([list(order).index(d) for d in range(len(shape))])


def draw_view(draw: Any, x: torch.Tensor, *, injective: bool = False, diagonal: bool = True) -> torch.Tensor:
    """One random view of a tensor, by one of PyTorch's view operators."""
    makers = [_permuted, _sliced, _unsqueezed, _same]
    if x.dim():
        makers += [_selected, _squeezed, _split, _flattened, _sliced]
    if x.dim() >= 2 and diagonal:
        makers.append(_diagonal)
    if not injective:
        makers.append(_expanded)
    if x.dtype == torch.complex64:
        makers.append(_real)
    if x.dtype in (torch.int32, torch.float32, torch.float16):
        makers.append(_reinterpreted)
    return draw(st.sampled_from(makers))(draw, x)


def draw_views(draw: Any, x: torch.Tensor, most: int = 4, **options: bool) -> torch.Tensor:
    for _ in range(draw(st.integers(0, most))):
        x = draw_view(draw, x, **options)
    return x


def _same(draw: Any, x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape)


def _permuted(draw: Any, x: torch.Tensor) -> torch.Tensor:
    return x.permute(draw(st.permutations(range(x.dim()))))


def _sliced(draw: Any, x: torch.Tensor) -> torch.Tensor:
    if not x.dim():
        return x.view(1)
    dim = draw(st.integers(0, x.dim() - 1))
    start = draw(st.integers(0, max(x.shape[dim] - 1, 0)))
    stop = draw(st.integers(start, x.shape[dim] + 1))
    return x[(slice(None),) * dim + (slice(start, stop, draw(st.integers(1, 3))),)]


def _selected(draw: Any, x: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, x.dim() - 1))
    return x.select(dim, draw(st.integers(0, x.shape[dim] - 1))) if x.shape[dim] else x


def _unsqueezed(draw: Any, x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(draw(st.integers(0, x.dim()))) if x.dim() < 6 else x


def _squeezed(draw: Any, x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(draw(st.integers(0, x.dim() - 1)))


def _expanded(draw: Any, x: torch.Tensor) -> torch.Tensor:
    shape = [draw(st.integers(1, 3)) if size == 1 else size for size in x.shape]
    return x.expand([draw(st.integers(1, 3))] * draw(st.integers(0, 1)) + shape) if x.dim() < 6 else x


def _split(draw: Any, x: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, x.dim() - 1))
    divisors = [n for n in range(1, x.shape[dim] + 1) if x.shape[dim] % n == 0]
    return x.unflatten(dim, (draw(st.sampled_from(divisors)), -1)) if divisors and x.dim() < 6 else x


def _flattened(draw: Any, x: torch.Tensor) -> torch.Tensor:
    first = draw(st.integers(0, x.dim() - 1))
    last = draw(st.integers(first, x.dim() - 1))
    shape = [*x.shape[:first], x.shape[first : last + 1].numel(), *x.shape[last + 1 :]]
    try:
        return x.view(shape)
    except RuntimeError:  # not contiguous there
        return x


def _diagonal(draw: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = draw(st.permutations(range(x.dim())))[:2]
    return x.diagonal(draw(st.integers(-2, 2)), first, second)


def _real(draw: Any, x: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(x)
    return draw(st.sampled_from([real, real[..., 0], real[..., 1]]))


def _reinterpreted(draw: Any, x: torch.Tensor) -> torch.Tensor:
    targets = {
        torch.float32: [torch.int32, torch.int16, torch.complex64],
        torch.int32: [torch.float32, torch.int8, torch.int64],
        torch.float16: [torch.int16, torch.float32],
    }
    dtype = draw(st.sampled_from(targets[x.dtype]))
    try:
        return torch.view_as_complex(x) if dtype == torch.complex64 else x.view(dtype)
    except RuntimeError:  # sizes or strides do not allow it
        return x


def draw_program(draw: Any, most: int = 8) -> Recorder:
    """A random program of reads and writes through views, recorded while it ran on CPU tensors. It only uses operators
    whose result does not depend on the order of their work, so that stages can be compared bit by bit."""
    pool = [draw(buffers(torch.float32)) for _ in range(draw(st.integers(1, 3)))]
    recorder = Recorder()
    with recorder:
        for _ in range(draw(st.integers(1, most))):
            statement = draw(st.sampled_from([_update, _update, _copy, _fill, _compute, _foreach, _random, _cast]))
            recorder.region = draw(st.sampled_from([0, 0, 0, 1]))
            statement(draw, pool)
    return recorder


def _pick(draw: Any, pool: list[torch.Tensor], **options: bool) -> torch.Tensor:
    return draw_views(draw, draw(st.sampled_from(pool)), 3, **options)


def _broadcastable(draw: Any, pool: list[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """A view of something that can be read along with the target, or a fresh tensor."""
    for _ in range(3):
        x = _pick(draw, pool)
        overlaps = x.untyped_storage()._cdata == target.untyped_storage()._cdata
        if not overlaps and x.dtype != torch.complex64:
            try:
                if torch.broadcast_shapes(x.shape, target.shape) == target.shape:
                    return x
            except RuntimeError:
                continue
    return torch.full(target.shape, 3.0)


def _update(draw: Any, pool: list[torch.Tensor]) -> None:
    x = _pick(draw, pool, injective=True)
    kind = draw(st.integers(0, 3))
    if kind == 0:
        x.add_(2)
    elif kind == 1 and x.dtype.is_floating_point:
        x.mul_(_broadcastable(draw, pool, x))
    elif kind == 2:
        x.eq_(_broadcastable(draw, pool, x))
    elif x.dtype.is_floating_point:
        x.neg_()


def _copy(draw: Any, pool: list[torch.Tensor]) -> None:
    x = _pick(draw, pool, injective=True)
    x.copy_(_broadcastable(draw, pool, x))


def _fill(draw: Any, pool: list[torch.Tensor]) -> None:
    x = _pick(draw, pool, injective=True)
    if draw(st.booleans()):
        x.zero_()
    else:
        x.fill_(7)


def _compute(draw: Any, pool: list[torch.Tensor]) -> None:
    x = _pick(draw, pool)
    pool.append((x + 1) * x)


def _cast(draw: Any, pool: list[torch.Tensor]) -> None:
    x = _pick(draw, pool)
    x = torch.view_as_real(x) if x.is_complex() else x
    pool.append(x.to(draw(st.sampled_from([torch.float32, torch.float16])), copy=True))


def _foreach(draw: Any, pool: list[torch.Tensor]) -> None:
    x = draw(st.sampled_from(pool))
    torch._foreach_mul_([draw_views(draw, x, 2, injective=True) for _ in range(draw(st.integers(1, 3)))], 2)


def _random(draw: Any, pool: list[torch.Tensor]) -> None:
    x = _pick(draw, pool, injective=True)
    if x.dtype.is_floating_point:
        x.uniform_()
