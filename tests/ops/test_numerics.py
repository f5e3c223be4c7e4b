"""Compiled programs compute what eager computes, on values where arithmetic goes wrong first.

A few graphs of the sweep in tests/ops/numerics.py, which runs all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import pytest
import torch

from tarry.backends.inductor import why_not
from tests.ops.numerics import (
    DTYPES,
    FLOATS,
    INTEGERS,
    Case,
    chain_cases,
    database_cases,
    difference,
    integer_chain_cases,
    number_cases,
    optimizer_cases,
    run_together,
)
from tests.support import tarry_only
from tests.support.pool import run_pool

USES_DEVICE = True
pytestmark = [tarry_only, pytest.mark.slow]
inductor = pytest.mark.skipif(bool(why_not("cpu")), reason="Inductor does not work here")


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    import tarry

    before = tarry.get_backend()
    tarry.set_backend(request.param, compile="wait")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    tarry.set_backend(before)


def _check(cases: Sequence[Case]) -> None:
    found = [f"{case.name}: {text}" for case, text in run_together(cases)]
    assert not found, "\n".join(found)


def _some(dtype: torch.dtype) -> list[Case]:
    pattern = "^(fmax|expm1|atanh|amax|argmin|any|nn.functional.elu|floor_divide|remainder)$"
    raising = {"floor_divide int8 zero", "remainder int8 zero"}  # see below
    chains = integer_chain_cases if dtype in INTEGERS else chain_cases
    return [case for case in [*database_cases(dtype, pattern), *chains(dtype)] if case.name not in raising]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["torchscript"], indirect=True)
def test_torchscript(backend: None, dtype: torch.dtype) -> None:
    _check([] if dtype not in (*FLOATS, *INTEGERS) else _some(dtype))


@inductor
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("backend", ["inductor"], indirect=True)
def test_inductor(backend: None, dtype: torch.dtype) -> None:
    _check(_some(dtype))


@inductor
@pytest.mark.parametrize("backend", ["inductor"], indirect=True)
def test_numbers_that_change_from_step_to_step(backend: None) -> None:
    for number in (0.1, -0.0, 1e-5):
        _check(list(number_cases(torch.float32, number)))


@inductor
@pytest.mark.parametrize("backend", ["inductor"], indirect=True)
def test_optimizers_with_tiny_and_huge_gradients(backend: None) -> None:
    wanted = ("Adam single float32", "Adam foreach float32", "SGD foreach bfloat16")
    _check([case for case in optimizer_cases() if case.name in wanted])


_RAISING = {
    "division": lambda x: torch.div(x, x * 0, rounding_mode="trunc"),
    "floor division": lambda x: x // (x * 0),
    "remainder": lambda x: torch.fmod(x, x * 0) + x % (x * 0),
    "power": lambda x: x ** -(x.numel() // 3),
}


def _setup() -> None:
    import tarry

    tarry.set_backend("inductor", compile="wait")


def _raised(kind: str) -> str:
    x = torch.tensor([1, 2, 3]).to("tarry")
    try:
        return str(_RAISING[kind](x).tolist())
    except RuntimeError as error:
        return f"raised {error}"


@inductor
def test_errors_of_integers_are_raised() -> None:
    """In a child: compiled code that divides by zero ends the process."""
    for done in run_pool(list(_RAISING), _raised, setup=_setup, jobs=1, timeout=300):
        assert done.crash is None, f"{done.task}: {done.crash}"
        assert done.value.startswith("raised"), f"{done.task}: {done.value}"
        wanted = "negative integer powers" if done.task == "power" else "ZeroDivisionError"
        assert wanted in done.value


@pytest.mark.parametrize(
    ("got", "want", "same"),
    [
        ([1.0, float("nan")], [1.0000001, float("nan")], True),
        ([0.0], [-0.0], False),
        ([float("inf")], [3e38], False),
        ([1.0], [1.001], False),
        ([float("nan")], [1.0], False),
    ],
)
def test_the_comparison_can_fail(got: list[float], want: list[float], same: bool) -> None:
    assert (difference(torch.tensor(got), torch.tensor(want), 4) is None) == same
