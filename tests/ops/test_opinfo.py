"""Every operator of PyTorch's OpInfo database against CPU eager, one test an operator.

The survey (``python -m tests.ops.survey``) gives the same as a report; these are the gate.
"""

from __future__ import annotations

import pytest
import torch

from tests.ops.check import Checker, all_ops
from tests.ops.known_failures import KNOWN_FAILURES, known_failure
from tests.ops.selection import REPRESENTATIVE
from tests.support import DEVICE

_F32 = all_ops(torch.float32)
_DTYPES = (torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _run(op_name: str, dtype: torch.dtype, device: str, samples: int) -> None:
    """Check one operator; a known failure must fail, everything else must not."""
    result = Checker(device, dtype, samples).check(all_ops(dtype)[op_name])
    reason = known_failure(op_name, _name(dtype)) if DEVICE == "tarry" else None
    if reason is None:
        assert not result.failures, "\n".join(result.failures)
    elif result.failures:
        pytest.xfail(reason)
    else:
        pytest.fail(f"{op_name} passes for {_name(dtype)}: remove it from tests/ops/known_failures.py ({reason})")


@pytest.mark.parametrize("op_name", [name for name in _F32 if name in REPRESENTATIVE])
def test_representative(op_name: str, device: str) -> None:
    _run(op_name, torch.float32, device, samples=1)


@pytest.mark.slow
@pytest.mark.parametrize("op_name", list(_F32))
def test_float32(op_name: str, device: str) -> None:
    _run(op_name, torch.float32, device, samples=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op_name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{_name(dtype)}")
        for dtype in _DTYPES
        for name in all_ops(dtype)
        if name in REPRESENTATIVE
    ],
)
def test_dtypes(op_name: str, dtype: torch.dtype, device: str) -> None:
    _run(op_name, dtype, device, samples=2)


def test_lists_name_operators_that_exist() -> None:
    every = {name for dtype in (torch.float32, *_DTYPES) for name in all_ops(dtype)}
    assert sorted(set(REPRESENTATIVE) - every) == []
    assert sorted({key.split("@")[0] for key in KNOWN_FAILURES} - every) == []
