"""Every form of indexing, read and written, against CPU eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import DEVICE, assert_same, both, dev

USES_DEVICE = True

BASE = torch.arange(60.0).reshape(3, 4, 5)
LONG = torch.tensor([2, 0, 1])
MASK = torch.tensor([True, False, True])


def _on(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return tuple(_on(v, device) for v in value) if isinstance(value, tuple) else value


INDICES: dict[str, Any] = {
    "int": 1,
    "negative int": -1,
    "two ints": (1, 2),
    "all ints": (1, 2, 3),
    "slice": slice(1, 3),
    "step": slice(None, None, 2),
    "over-long slice": slice(-100, 100),
    "over-long negative stop": slice(None, -100),
    "empty slice": slice(2, 1),
    "slices": (slice(1, None), slice(None, -1), slice(0, 5, 3)),
    "none": None,
    "none inside": (0, None, slice(1, 3)),
    "ellipsis": ...,
    "ellipsis last": (..., 0),
    "ellipsis first": (1, ...),
    "ellipsis middle": (0, ..., slice(1, 4)),
    "none and ellipsis": (None, ..., None),
    "long tensor": LONG,
    "long tensor inside": (slice(None), torch.tensor([3, 3, 0])),
    "negative long": torch.tensor([-1, -3]),
    "long 2d": torch.tensor([[0, 1], [2, 2]]),
    "two long": (LONG, torch.tensor([1, 3, 0])),
    "broadcast long": (LONG[:, None], torch.tensor([1, 3])),
    "long apart": (LONG, slice(None), torch.tensor([4, 0, 2])),
    "long with slice": (slice(1, 3), torch.tensor([0, 2]), slice(None, None, 2)),
    "long with int": (1, torch.tensor([0, 2])),
    "long with none": (None, LONG),
    "int32 tensor": torch.tensor([1, 2], dtype=torch.int32),
    "zero-dim long": torch.tensor(1),
    "empty long": torch.tensor([], dtype=torch.long),
    "list": [0, 2],
    "list inside": (slice(None), [1, 1, 0]),
    "two lists": ([0, 1, 2], [1, 2, 3]),
    "bool mask": MASK,
    "bool mask inside": (slice(None), torch.tensor([True, False, False, True])),
    "bool list": [True, False, True],
    "full mask": BASE % 2 == 0,
    "two-dim mask": BASE[:, :, 0] > 20,
    "mask and slice": (MASK, slice(1, 2)),
    "mask and int": (MASK, 2),
    "mask of nothing": torch.zeros(3, dtype=torch.bool),
    "true": True,
    "false": False,
    "numpy-like tuple": (0, slice(None), [0, 4]),
    "host index": torch.tensor([1, 0]),
}


@pytest.mark.parametrize("name", list(INDICES))
def test_read(name: str) -> None:
    index = INDICES[name]
    expected = BASE[index]
    actual = dev(BASE)[_on(index, DEVICE)]
    assert actual.stride() == expected.stride() or expected.numel() < 2
    assert_same(actual, expected, exact=True)


@pytest.mark.parametrize("name", list(INDICES))
@pytest.mark.parametrize("value", ["number", "tensor", "zero-dim tensor", "host scalar", "broadcast"])
def test_write(name: str, value: str) -> None:
    index = INDICES[name]
    expected, actual = BASE.clone(), dev(BASE)
    shape = expected[index].shape
    # Distinct values would make the order of writes to one place count; eager leaves that open.
    repeats = name in ("long tensor inside", "long 2d", "list inside", "broadcast long")
    filler = torch.full(shape, 7.0) if repeats else torch.arange(float(shape.numel())).reshape(shape) + 100
    if value == "broadcast":
        filler = filler[..., :1] if len(shape) else filler
    number = {"number": -1.5, "host scalar": torch.tensor(-2.5), "zero-dim tensor": torch.tensor(3.5)}.get(
        value, filler
    )
    expected[index] = number
    actual[_on(index, DEVICE)] = number if value in ("number", "host scalar") else dev(number)
    assert_same(actual, expected, exact=True)


@pytest.mark.parametrize("name", [n for n in INDICES if "nothing" not in n])
def test_augmented(name: str) -> None:
    index = INDICES[name]
    expected, actual = BASE.clone(), dev(BASE)
    expected[index] += 1
    actual[_on(index, DEVICE)] += 1
    expected[index] *= 2
    actual[_on(index, DEVICE)] *= 2
    assert_same(actual, expected, exact=True)


def test_host_index_into_a_device_tensor() -> None:
    x = dev(BASE)
    assert_same(x[LONG], BASE[LONG], exact=True)
    assert_same(x[MASK], BASE[MASK], exact=True)
    x[LONG[:1]] = 0
    assert x[2].sum().item() == 0


def test_gradients_of_reads() -> None:
    for name in ("long tensor", "long apart", "bool mask", "slices", "broadcast long", "list inside", "full mask"):
        index = INDICES[name]
        expected, actual = BASE.clone().requires_grad_(), dev(BASE).requires_grad_()
        (expected[index] ** 2).sum().backward()
        (actual[_on(index, DEVICE)] ** 2).sum().backward()
        assert_same(actual.grad, expected.grad)


def test_gradients_of_writes() -> None:
    def program(x: Tensor, value: Tensor) -> list[Tensor]:
        x, value = x.detach().requires_grad_(), value.detach().requires_grad_()
        y = x * 2
        y[1:, [0, 2]] = value
        y[..., 0] *= 3
        y[y > 100] = 0.0
        (y**2).sum().backward()
        return [x.grad, value.grad]

    both(program, BASE, torch.randn(2, 2, 5))


def test_index_errors_come_at_once() -> None:
    x = dev(BASE)
    with pytest.raises(IndexError, match=r"out of range|out of bounds"):
        x[3]
    with pytest.raises(IndexError, match="too many indices"):
        x[0, 0, 0, 0]
    with pytest.raises(ValueError, match="greater than zero"):
        x[::-1]
    with pytest.raises(IndexError):
        x[torch.tensor([True, False], device=DEVICE)]
    with pytest.raises((IndexError, RuntimeError)):
        x[1.5]
    with pytest.raises(RuntimeError, match=r"shape mismatch|expand"):
        x[0] = dev(torch.ones(3, 3))
    assert_same(x + 1, BASE + 1)


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(accumulate: bool) -> None:
    rows = torch.tensor([0, 2, 0]) if accumulate else torch.tensor([0, 2, 1])

    def program(x: Tensor, rows: Tensor, values: Tensor) -> list[Tensor]:
        y = x.index_put((rows,), values, accumulate=accumulate)
        x.index_put_((rows, rows), values[:, 0], accumulate=accumulate)
        return [x, y]

    both(program, BASE, rows, torch.ones(3, 4, 5))


def test_the_named_family() -> None:
    def program(x: Tensor, index: Tensor, mask: Tensor) -> list[Tensor]:
        wide = index[:, None].expand(3, 4)
        y = x[..., 0].clone()
        return [
            x.index_select(0, index),
            x.index_add(0, index, x),
            x.index_copy(0, index, x * 2),
            x.index_fill(1, index, -1),
            y.gather(0, wide),
            y.scatter(0, wide, 9.0),
            y.scatter(0, wide, y * 2),
            y.scatter_add(0, wide, y),
            y.scatter_reduce(0, wide, y, "amax"),
            x.take(index),
            x.take_along_dim(index[:, None, None], 0),
            x.masked_fill(mask[:, None, None], 0),
            x.masked_select(mask[:, None, None]),
            x.masked_scatter(mask[:, None, None], x.flip(0)),
            torch.where(mask[:, None, None], x, -x),
            torch.where(mask[:, None, None], x, 0.0),
            x.put(index, y[:3, 0]),
            x.nonzero(),
            *torch.where(mask),
            torch.nonzero(x > 50),
            x.argwhere(),
            x.unique(),
            x.roll(1, 0),
            x.narrow(1, 1, 2),
            x.unfold(2, 3, 1),
        ]

    both(program, BASE, LONG, MASK)


def test_write_through_an_indexed_view() -> None:
    def program(x: Tensor) -> Tensor:
        x[1][2] = 5
        x[0, ::2].zero_()
        x[..., 1:3].mul_(-1)
        x.select(0, 2).t()[0] = torch.arange(4.0, device=x.device)
        row = x[0]
        row += 1
        return x

    both(program, BASE, exact=True)


def test_numbers_that_change_do_not_change_the_answer() -> None:
    x = dev(torch.zeros(5))
    for i in range(5):
        x[i] = i * 1.5
    assert x.tolist() == [0.0, 1.5, 3.0, 4.5, 6.0]
    assert [x[i].item() for i in range(5)] == [0.0, 1.5, 3.0, 4.5, 6.0]
