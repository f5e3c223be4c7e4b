"""Operators on lists of tensors (`torch._foreach_*`) whose tensors are on several devices."""

from __future__ import annotations

import pytest
import torch

from tests.support import DEVICE, tarry_only

USES_DEVICE = True
pytestmark = tarry_only


def _pair() -> list[torch.Tensor]:
    """The same values on both devices."""
    torch.manual_seed(0)
    x = torch.rand(2, 3)
    return [x.to(DEVICE), x]


def _check(results: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> None:
    assert [t.device.type for t in results] == ["tarry", "cpu"]
    assert torch.equal(results[0].cpu(), results[1])


def test_each_result_is_where_its_arguments_are() -> None:
    pair = _pair()
    _check(torch._foreach_sqrt(pair))
    _check(torch._foreach_add(pair, pair, alpha=2))
    _check(torch._foreach_addcdiv(pair, pair, pair, 0.5))
    _check(torch._foreach_norm(pair))
    _check(torch._foreach_abs([torch.tensor(-1.0, device=DEVICE), torch.tensor(-1.0)]))


def test_in_place() -> None:
    pair = _pair()
    expected = pair[1] * 3
    torch._foreach_mul_(pair, [torch.tensor(3.0, device=DEVICE), torch.tensor(3.0)])
    _check(pair)
    assert torch.equal(pair[1], expected)
    assert all(t._version > 0 for t in pair)


def test_gradients() -> None:
    pair = [t.requires_grad_() for t in _pair()]
    torch.autograd.backward([result.sum() for result in torch._foreach_mul(pair, pair)])
    _check([t.grad for t in pair if t.grad is not None])


def test_devices_that_differ_at_one_place_are_refused() -> None:
    pair = _pair()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch._foreach_add(pair, pair[::-1])
