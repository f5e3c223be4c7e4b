"""Operators with ``out=`` that write to other arguments besides: those keep, or are computed from, what was in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support import assert_same, tarry_only

aten = torch.ops.aten


def _pending(device: str, value: float, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What it holds is not computed yet when the operator is recorded."""
    return torch.full(size, value - 1, device=device, dtype=dtype) + 1


def _adam(device: str) -> list[Tensor]:
    params, grads, means, squares = ([_pending(device, v, 3), _pending(device, 2 * v, 2)] for v in (1.0, 0.5, 0.1, 0.2))
    out = [_pending(device, 9.0, 3), _pending(device, 9.0, 2)]
    steps = [_pending(device, 1.0) for _ in params]
    options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    aten._fused_adamw.out(params, grads, means, squares, [], steps, lr=0.1, out=out, **options)
    return [*out, *params, *grads, *means, *squares]


def _scale(device: str) -> list[Tensor]:
    scale, tracker = _pending(device, 4.0, 1), _pending(device, 1, 1, dtype=torch.int32)
    out = _pending(device, 9.0, 1)
    aten._amp_update_scale.out(scale, tracker, _pending(device, 0.0, 1), 2.0, 0.5, 2, out=out)
    return [out, scale, tracker]


def _unscale(device: str) -> list[Tensor]:
    grads, found, out = [_pending(device, 2.0, 3)], _pending(device, 1.0, 1), [_pending(device, 9.0, 3)]
    aten._amp_foreach_non_finite_check_and_unscale.out(grads, found, _pending(device, 0.5, 1), out=out)
    return [*out, *grads, found]


def _batch_norm(device: str) -> list[Tensor]:
    x = torch.arange(12.0, device=device).view(2, 3, 2)
    mean, variance = _pending(device, 2.0, 3), _pending(device, 3.0, 3)
    out = [_pending(device, 9.0, 2, 3, 2), _pending(device, 9.0, 3), _pending(device, 9.0, 3)]
    named = dict(zip(("out", "save_mean", "save_invstd"), out, strict=True))
    aten._native_batch_norm_legit.out(x, None, None, mean, variance, True, 0.1, 1e-5, **named)
    return [*out, mean, variance]


def _rrelu(device: str) -> list[Tensor]:
    noise, out = _pending(device, 7.0, 4), _pending(device, 9.0, 4)
    aten.rrelu_with_noise.out(torch.linspace(-1, 1, 4, device=device), noise, 0.1, 0.3, False, out=out)
    return [out, noise]


@pytest.mark.parametrize("program", [_adam, _scale, _unscale, _batch_norm, _rrelu])
def test_other_arguments_keep_what_was_in_them(program: Callable[[str], list[Tensor]], device: str) -> None:
    for _ in range(2):  # the second time, the signature is known
        assert_same(program(device), program("cpu"))


@tarry_only
def test_only_what_is_out_is_overwritten() -> None:
    from tarry.codegen.natives import natives
    from tarry.codegen.op_table import facts

    write_more = [
        name
        for name, function in natives().by_name.items()
        if function.func.is_out_fn()
        and any(a.annotation is not None and a.annotation.is_write for a in function.func.arguments.flat_non_out)
    ]
    assert "_fused_adam.out" in write_more
    assert [name for name in write_more if facts(f"aten::{name}").overwrites] == []
    assert facts("aten::add.out").overwrites
