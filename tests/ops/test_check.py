"""The survey's own machinery: if a check could not fail, or a crash ended the run, no number would mean anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops.check import Checker, all_ops
from tests.support.move import move


def _wrong_second_time(fn: Callable[..., Any], spoil: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """``fn``, whose every second call (the device's side of a comparison) is spoiled."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        value = fn(*args, **kwargs)
        return spoil(value) if calls % 2 == 0 else value

    return wrapped


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda t: t + 1e-3, "not close"),
        (lambda t: t.double(), "float64"),
        (lambda t: t.unsqueeze(0), "instead of"),
    ],
    ids=["value", "dtype", "shape"],
)
def test_a_wrong_result_is_reported(spoil: Callable[[torch.Tensor], torch.Tensor], expected: str) -> None:
    op = copy.copy(all_ops(torch.float32)["exp"])
    op.op = _wrong_second_time(op.op, spoil)
    result = Checker("cpu", torch.float32, samples=2, modes=("forward",)).check(op)
    assert result.failures
    assert expected in result.failures[0]


def test_a_wrong_gradient_is_reported() -> None:
    op = copy.copy(all_ops(torch.float32)["exp"])
    op.op = _wrong_second_time(op.op, lambda t: t + (t.sum() - t.sum().detach()))
    result = Checker("cpu", torch.float32, samples=2, modes=("backward",)).check(op)
    assert result.failures


def test_an_error_on_one_side_only_is_reported() -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel")

    op = copy.copy(all_ops(torch.float32)["exp"])
    op.op = _wrong_second_time(op.op, fail)
    result = Checker("cpu", torch.float32, samples=1, modes=("forward",)).check(op)
    assert "no kernel" in result.failures[0]


def test_move_keeps_strides_offsets_and_sharing() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    a, b = base[1:, ::2].t(), base[2]
    x, y = move((a, b), "cpu")
    assert (x.stride(), x.storage_offset()) == (a.stride(), a.storage_offset())
    x.zero_()
    assert y[0] == 0, "the copies share a storage with each other"
    assert base[2, 0] == 12, "and not with the original"
