"""Moves between host and device, and between dtypes and memory formats."""

from __future__ import annotations

import pytest
import torch

from tests.support import DEVICE, assert_same, both, dev, expect, step, tarry_only

USES_DEVICE = True

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    there = x.to(DEVICE)
    assert there.device.type == DEVICE
    assert there.dtype == dtype
    assert torch.equal(there.cpu(), x)


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.int64, torch.bool, torch.bfloat16], ids=str)
def test_dtype_conversion(source: torch.dtype, target: torch.dtype) -> None:
    both(lambda x: x.to(target), torch.tensor([0, 1, 3, -2]).to(source), exact=True)


def test_conversions_by_name() -> None:
    x = torch.tensor([1.7, -2.2, 0.0])
    for name in ("float", "double", "half", "bfloat16", "int", "long", "short", "char", "bool"):
        both(lambda t, n=name: getattr(t, n)(), x, exact=True)
    both(lambda t: t.type(torch.int32), x, exact=True)


def test_to_device_and_dtype_at_once() -> None:
    x = torch.tensor([1.5, 2.5])
    assert_same(x.to(DEVICE, torch.float64), x.double(), exact=True)
    assert_same(x.to(device=DEVICE, dtype=torch.int32, non_blocking=True), x.int(), exact=True)
    back = x.to(DEVICE).to("cpu", torch.float64)
    assert back.device.type == "cpu"
    assert torch.equal(back, x.double())


def test_to_the_same_place_is_the_same_tensor() -> None:
    x = dev(torch.ones(2))
    assert x.to(DEVICE) is x
    assert x.to(DEVICE, copy=True) is not x
    assert x.float() is x
    assert x.to(x) is x


def test_to_like_another_tensor() -> None:
    assert_same(torch.tensor([1, 2]).to(dev(torch.ones(1))), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copy_in_both_directions(non_blocking: bool) -> None:
    source = torch.arange(6.0).reshape(2, 3)
    there = torch.empty(2, 3, device=DEVICE).copy_(source, non_blocking=non_blocking)
    assert_same(there, source, exact=True)
    back = torch.empty(2, 3).copy_(there * 2, non_blocking=non_blocking)
    assert torch.equal(back, source * 2)
    mixed = torch.empty(2, 3, dtype=torch.int32).copy_(there)
    assert torch.equal(mixed, source.int())


def test_copy_broadcasts_and_strides() -> None:
    wide = torch.zeros(3, 4, device=DEVICE)
    wide.copy_(torch.arange(4.0))
    wide.t()[1].copy_(torch.tensor([7.0, 8.0, 9.0]))
    expected = torch.arange(4.0).expand(3, 4).clone()
    expected[:, 1] = torch.tensor([7.0, 8.0, 9.0])
    assert_same(wide, expected, exact=True)
    host = torch.zeros(4, 3)
    host.t().copy_(wide)
    assert torch.equal(host, expected.t())
    host.t()[1:].copy_(wide[:2])
    assert torch.equal(host.t()[1:], expected[:2])


def test_the_host_tensor_may_change_after_the_move() -> None:
    host = torch.zeros(1000)
    there = host.to(DEVICE, copy=True)
    later = there + 1
    host.fill_(5)
    assert_same(later, torch.ones(1000))
    assert_same(there, torch.zeros(1000))


def test_a_host_copy_does_not_follow_the_device() -> None:
    there = torch.zeros(3, device=DEVICE)
    host = there.to("cpu", copy=True)
    there.add_(1)
    step()
    assert torch.equal(host, torch.zeros(3))
    host.fill_(9)
    assert_same(there, torch.ones(3))


def test_strided_and_expanded_sources() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for view in (base.t(), base[:, ::2], base[1:], base[:1].expand(3, 4), base[2, 1], base[:0]):
        moved = view.to(DEVICE, copy=True)
        expected = view.to("cpu", copy=True)
        assert moved.stride() == expected.stride()
        assert_same(moved, expected, exact=True)
        assert torch.equal(moved.cpu(), view)


def test_views_come_back_alone() -> None:
    there = dev(torch.arange(12.0).reshape(3, 4))
    assert torch.equal(there.t()[1:, ::2].cpu(), torch.arange(12.0).reshape(3, 4).t()[1:, ::2])
    assert torch.equal(there[1].cpu(), torch.arange(4.0, 8.0))


def test_gradients_flow_through_moves() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (x.to(DEVICE) * 3).to("cpu").sum().backward()
    assert torch.equal(x.grad, torch.tensor([3.0, 3.0]))
    y = torch.ones(2, device=DEVICE, requires_grad=True)
    (y.double() * 2).cpu().sum().backward()
    assert_same(y.grad, torch.tensor([2.0, 2.0]))


def test_channels_last() -> None:
    x = torch.randn(2, 3, 4, 5)

    def program(t: torch.Tensor) -> list[torch.Tensor]:
        last = t.to(memory_format=torch.channels_last)
        assert last.is_contiguous(memory_format=torch.channels_last)
        relu = (last + 1).relu()
        assert relu.is_contiguous(memory_format=torch.channels_last), "pointwise results keep the format"
        like = torch.empty_like(last)
        assert like.stride() == last.stride()
        return [last, relu, last.contiguous(), relu.mean((2, 3)), last.clone(memory_format=torch.preserve_format)]

    both(program, x)
    moved = x.to(memory_format=torch.channels_last).to(DEVICE)
    assert moved.is_contiguous(memory_format=torch.channels_last)
    assert moved.cpu().is_contiguous(memory_format=torch.channels_last)


def test_channels_last_convolution() -> None:
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    expected = conv(x)
    actual = conv.to(DEVICE)(x.to(DEVICE))
    assert actual.stride() == expected.stride()
    assert_same(actual, expected)


@tarry_only
def test_a_move_to_the_device_does_not_cut() -> None:
    with expect(syncs=0, compiles=0):
        x = torch.ones(4).to(DEVICE)
        x = x + torch.arange(4, device=DEVICE)
        x.copy_(torch.zeros(4))
    assert x.tolist() == [0.0] * 4


def test_pinned_and_shared_requests_are_answered() -> None:
    x = dev(torch.ones(2))
    assert x.is_pinned() is False
    assert torch.equal(x.cpu(), torch.ones(2))


def test_empty_and_zero_dimensional() -> None:
    for shape in ((0,), (0, 3), (2, 0), (), (1,), (1, 1, 1)):
        both(lambda t: [t + 1, t.sum(), t.reshape(-1), t.clone(), t.t() if t.dim() == 2 else t], torch.ones(shape))
    both(lambda t: [torch.cat([t, t]), t.mean(), t.any(), t.prod()], torch.empty(0))
    both(lambda t: t.max(), torch.empty(0))
    both(lambda t: [t * t, t.unsqueeze(0), t.item(), float(t), t.expand(3)], torch.tensor(2.5))
