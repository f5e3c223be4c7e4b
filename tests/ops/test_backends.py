"""The operator suite, models and random programs on the backends that compile.

TorchScript runs every operator; the FX lowering, which Inductor and all torch.compile backends share, is run by FX
itself on those that stand for the rest; and Inductor, which takes seconds for each, on a few of every kind. The surveys
run all of them: ``python -m tests.ops.survey --backend inductor``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tarry.backends.inductor import why_not
from tests.aliasing.test_random_programs import play, play_gradients
from tests.models.program import compare
from tests.models.zoo import QUICK, ZOO
from tests.ops.check import Checker, all_ops
from tests.ops.known_failures import known_failure
from tests.ops.selection import REPRESENTATIVE
from tests.support import DEVICE, load_device, tarry_only

USES_DEVICE = True
pytestmark = [tarry_only, pytest.mark.slow]

FX = "dynamo:eager"
_NAMES = """
    add addcmul index_put scatter_add scatter_reduce.amax cat cumsum var as_strided masked_fill gather
    nn.functional.conv2d nn.functional.batch_norm nn.functional.layer_norm nn.functional.dropout linalg.svd
    nn.functional.scaled_dot_product_attention nn.functional.cross_entropy nn.functional.embedding
"""
INDUCTOR_OPERATORS = _NAMES.split()
OPERATORS = {
    "torchscript": list(all_ops(torch.float32)),
    FX: [name for name in all_ops(torch.float32) if name in REPRESENTATIVE],
    "inductor": INDUCTOR_OPERATORS,
}
MODELS = {"torchscript": QUICK, FX: QUICK, "inductor": ()}  # Inductor's models: tests/backends/test_inductor.py


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    import tarry

    load_device()
    if request.param == "inductor" and why_not("cpu"):
        pytest.skip(why_not("cpu"))
    before = tarry.get_backend()
    load_device(DEVICE, request.param)
    yield request.param
    tarry.set_backend(before)


def _cases(table: dict[str, object]) -> list[object]:
    return [pytest.param(b, name, id=f"{b}-{name}") for b, names in table.items() for name in names]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("backend", "op_name"), _cases(OPERATORS), indirect=["backend"])
def test_operators(backend: str, op_name: str) -> None:
    modes = ("forward", "backward") if backend == "inductor" else ("forward", "backward", "inplace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = Checker(DEVICE, torch.float32, samples=1, modes=modes).check(all_ops(torch.float32)[op_name])
    reason = known_failure(op_name, "float32")
    if reason is not None and result.failures:
        pytest.xfail(reason)
    assert not result.failures, "\n".join(result.failures)
    assert reason is None, f"{op_name} passes: remove it from tests/ops/known_failures.py"


@pytest.mark.parametrize(("backend", "name"), _cases(MODELS), indirect=["backend"])
def test_models(backend: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compare(ZOO[name], DEVICE).ok


@pytest.mark.parametrize("backend", ["torchscript", FX], indirect=True)
def test_random_programs(backend: str) -> None:
    @given(st.data())
    @settings(max_examples=40)
    def programs(data: st.DataObject) -> None:
        play(data, lines=15)

    @given(st.data())
    @settings(max_examples=30)
    def gradients(data: st.DataObject) -> None:
        play_gradients(data, lines=10)

    programs()
    gradients()
