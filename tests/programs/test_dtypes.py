"""Types: promotion of numbers and tensors, and the dtypes that are not float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support import both, dev, tarry_only

USES_DEVICE = True

TYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


@pytest.mark.parametrize("number", [2, 2.0, True, 1.5 + 0j, -3])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_numbers_promote_as_numbers(dtype: torch.dtype, number: complex) -> None:
    x = torch.tensor([0, 1, 1]).to(dtype)
    both(lambda t: [t + number, number * t, t == number], x, exact=True)


def test_bfloat16_plus_a_float_stays() -> None:
    x = dev(torch.ones(2, dtype=torch.bfloat16))
    assert (x + 2.0).dtype == torch.bfloat16
    assert (x * 3).dtype == torch.bfloat16
    assert (2.0 - x).dtype == torch.bfloat16
    assert torch.add(x, 1.0, alpha=2).dtype == torch.bfloat16
    assert torch.where(x > 0, x, 0.0).dtype == torch.bfloat16
    assert (x.int() + 1.5).dtype == torch.float32
    assert (x.int() / 2).dtype == torch.float32


@pytest.mark.parametrize(("left", "right"), list(itertools.combinations_with_replacement(TYPES, 2)), ids=str)
def test_tensors_promote(left: torch.dtype, right: torch.dtype) -> None:
    a, b = torch.tensor([1, 2]).to(left), torch.tensor([2, 2]).to(right)
    both(
        lambda x, y: [x * y, x + y, torch.maximum(x, y) if not (x.is_complex() or y.is_complex()) else x],
        a,
        b,
        exact=True,
    )


def test_zero_dimensional_tensors_promote_by_category() -> None:
    def program(t: Tensor, scalar: Tensor) -> list[Tensor]:
        return [t + scalar, scalar * t, torch.result_type(t, scalar) == t.dtype]

    for a, b in itertools.product(
        [torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.int32, torch.float64)], repeat=2
    ):
        both(program, a, b.sum())
    assert (dev(torch.ones(2, dtype=torch.float16)) + torch.tensor(2.0)).dtype == torch.float16, (
        "a host scalar is a number"
    )


def test_in_place_keeps_the_type_or_refuses() -> None:
    both(lambda t: t.add_(1), torch.ones(2, dtype=torch.bfloat16))
    both(lambda t: t.mul_(2.5), torch.ones(2, dtype=torch.int64))
    both(lambda t, u: t.add_(u), torch.ones(2, dtype=torch.int64), torch.ones(2))
    both(lambda t, u: t.copy_(u), torch.ones(2, dtype=torch.int64), torch.tensor([1.7, -1.7]))
    both(lambda t: t.div_(2), torch.ones(2, dtype=torch.int64))


PROGRAMS: dict[str, Callable[[Tensor], object]] = {
    "pointwise": lambda t: [t + t, t * t, -t if t.dtype != torch.bool else ~t],
    "reduce": lambda t: [t.sum(), t.sum(0), t.prod(1), t.all(), t.any(0)],
    "shape": lambda t: [t.t(), t.reshape(-1), t[1:], torch.cat([t, t]), torch.stack([t, t]), t.flip(0)],
    "index": lambda t: [
        t[[1, 0]],
        t.masked_fill(t == 1, 0),
        torch.where(t == 1, t, t),
        t.gather(0, torch.zeros_like(t, dtype=torch.long)),
    ],
    "compare": lambda t: [t == 1, t != t, torch.equal(t, t)],
    "cast": lambda t: [t.to(torch.float64) if not t.is_complex() else t.to(torch.complex128), t.bool()],
}


@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_programs_in_every_type(name: str, dtype: torch.dtype) -> None:
    both(PROGRAMS[name], torch.tensor([[0, 1, 2], [1, 3, 1]]).to(dtype))


def test_integers() -> None:
    def program(t: Tensor) -> list[Tensor]:
        return [
            t // 2,
            t % 3,
            t << 1,
            t >> 1,
            t & 3,
            t | 4,
            t ^ 5,
            ~t,
            t.abs(),
            t.float().mean(),
            t.cumsum(0),
            t.sort().values,
            t.unique(),
            t.bincount(),
            torch.div(t, 2, rounding_mode="floor"),
            t.clamp(1, 4),
            t.argmax(),
            t**2,
        ]

    both(program, torch.tensor([5, 0, 3, 3, 7]), exact=True)


def test_booleans() -> None:
    def program(t: Tensor) -> list[Tensor]:
        return [
            t & ~t,
            t | t,
            t ^ True,
            t.sum(),
            t.float(),
            t.logical_not(),
            t.nonzero(),
            t.all(),
            t.cumsum(0),
            t.long() * 2,
        ]

    both(program, torch.tensor([True, False, True]), exact=True)


def test_complex() -> None:
    def program(t: Tensor) -> list[Tensor]:
        return [
            t.abs(),
            t.angle(),
            t.real,
            t.imag,
            t.conj() * t,
            t @ t.mH,
            t.exp(),
            torch.polar(t.abs(), t.angle()),
            torch.fft.ifft(torch.fft.fft(t)),
            torch.fft.rfft(t.real),
            t.conj().t(),
            torch.view_as_real(t),
            (t.conj() + 1j).imag,
        ]

    both(program, torch.randn(3, 3, dtype=torch.complex64))


def test_complex_gradients() -> None:
    def program(t: Tensor) -> Tensor | None:
        t = t.detach().requires_grad_()
        (torch.fft.fft(t * 1j).abs() ** 2).sum().backward()
        return t.grad

    both(program, torch.randn(5, dtype=torch.complex128))


def test_float64_keeps_its_precision() -> None:
    x = dev(torch.tensor([1.0], dtype=torch.float64))
    assert (x + 1e-12).item() != 1.0
    assert (x * (1 + 1e-15)).item() != 1.0


def test_integers_keep_theirs() -> None:
    big = 2**53 + 1
    assert dev(torch.tensor([big])).item() == big
    assert (dev(torch.tensor([0])) + big).item() == big
    assert torch.full((1,), big, device=dev(0).device).item() == big


@tarry_only
def test_histc_of_integers() -> None:
    """Mixture-of-experts models count with it off the CPU, where it works on integers; so it must here."""
    counts = torch.histc(dev(torch.tensor([0, 1, 1, 3], dtype=torch.int32)), bins=4, min=0, max=3)
    assert counts.tolist() == [1, 2, 0, 1]


def test_counting() -> None:
    both(lambda t: torch.histc(t.float(), bins=4, min=0, max=3), torch.tensor([0, 1, 1, 3]))
    both(lambda t: torch.bincount(t, minlength=5), torch.tensor([0, 1, 1, 3]))
