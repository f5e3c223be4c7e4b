"""In-place and out= variants of PyTorch's own operator database, through all passes, on dense and on sliced tensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.ir.raw import same_bits
from tests.passes.check import check_stages, record

pytestmark = pytest.mark.slow

SKIP = {
    "addbmm": "in place it resizes what it writes to, which no recorder would accept",
    "nn.functional.rrelu": "reads a buffer of noise that was never written",
    "kron": "out= is resized twice on the way, which the recorder of these tests does not follow",
    "nn.functional.avg_pool3d": "PyTorch writes out= as if it were contiguous",
    "nn.functional.gelu": "PyTorch writes nothing to an out= with gaps on some processors",
    "nn.functional.linear": "out= is replaced by a tensor of other strides",
    "narrow_copy": "PyTorch writes out= as if it were contiguous",
    "fft.hfft": "works on lazily conjugated tensors, which storages of the recorder do not hold",
    "fft.hfft2": "the same",
    "fft.hfftn": "the same",
}


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Kernels round differently for other strides: a vectorised one, another matrix product."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return same_bits(a, b) or (a.dtype.is_floating_point and torch.allclose(a, b, 1e-3, 1e-4, equal_nan=True))


def in_gaps(x: torch.Tensor) -> torch.Tensor:
    """The tensor as every other element of a bigger one."""
    return torch.stack([x, x], -1)[..., 0]


@pytest.fixture(scope="module")
def op_db() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.name not in SKIP]


def samples(op: Any, dtype: torch.dtype, count: int) -> Iterator[Any]:
    if dtype not in op.supported_dtypes("cpu"):
        return
    for k, sample in enumerate(op.sample_inputs("cpu", dtype)):
        if k == count:
            return
        if isinstance(sample.input, torch.Tensor):
            yield sample


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT if x.dim() > 1 else x.clone()


def failures(cases: Iterator[tuple[str, Callable[[], Any]]], at_least: int) -> list[str]:
    """The operators whose stages differ from what the operator did, with the first line that says so."""
    found, done = [], 0
    for name, program in cases:
        recorder = record(program)
        try:
            check_stages(recorder, close)
        except (AssertionError, RuntimeError) as error:
            found.append(f"{name}: {str(error).splitlines()[0]}")
        done += 1
    assert done > at_least
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_in_place_variants(op_db: list[Any], dtype: torch.dtype) -> None:
    def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
        for op in op_db:
            for sample in samples(op, dtype, 2) if op.inplace_variant is not None else ():
                for place in (torch.clone, in_gaps):
                    call = functools.partial(op.inplace_variant, **sample.kwargs)
                    try:
                        call(place(sample.input.detach()), *sample.args)
                    except (RuntimeError, ValueError):
                        continue  # a sample that broadcasts or promotes, which in-place operators refuse
                    yield op.name, functools.partial(call, place(sample.input.detach()), *sample.args)

    assert failures(cases(), 200) == []


@pytest.mark.filterwarnings("ignore")
def test_out_variants(op_db: list[Any]) -> None:
    def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
        for op in op_db:
            for sample in samples(op, torch.float32, 1) if op.supports_out else ():
                call = functools.partial(op, sample.input.detach(), *sample.args, **sample.kwargs)
                try:
                    result = call()
                except (RuntimeError, ValueError):
                    continue  # a sample that is meant to fail
                if isinstance(result, torch.Tensor) and result.layout == torch.strided:
                    for place in (in_gaps, transposed):
                        yield op.name, functools.partial(call, out=place(torch.zeros_like(result)))

    assert failures(cases(), 350) == []
