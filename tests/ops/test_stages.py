"""Operators, models and random programs through the IR: what the passes make of a step must compute what was recorded.

The reference backend interprets recordings directly and would never notice a fault of the graph builder or of a pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aliasing.test_random_programs import play, play_gradients
from tests.models.program import compare
from tests.models.zoo import QUICK, ZOO
from tests.ops.check import Checker, all_ops
from tests.ops.known_failures import known_failure
from tests.ops.selection import REPRESENTATIVE
from tests.support import DEVICE, load_device, tarry_only

USES_DEVICE = True
pytestmark = [tarry_only, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _through_the_passes() -> Iterator[None]:
    import tarry

    load_device()
    before = tarry.get_backend()
    load_device(DEVICE, "ir-optimized")
    yield
    tarry.set_backend(before)


@pytest.mark.parametrize("op_name", [name for name in all_ops(torch.float32) if name in REPRESENTATIVE])
def test_operators(op_name: str) -> None:
    assert known_failure(op_name, "float32") is None
    modes = ("forward", "backward", "inplace", "out")
    result = Checker(DEVICE, torch.float32, samples=1, modes=modes).check(all_ops(torch.float32)[op_name])
    assert not result.failures, "\n".join(result.failures)


@pytest.mark.parametrize("name", QUICK)
def test_models(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compare(ZOO[name], DEVICE).ok


@given(st.data())
@settings(max_examples=100)
def test_random_programs(data: st.DataObject) -> None:
    play(data, lines=20)


@given(st.data())
@settings(max_examples=60)
def test_random_gradients(data: st.DataObject) -> None:
    play_gradients(data, lines=10)
