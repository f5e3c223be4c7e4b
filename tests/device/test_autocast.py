"""torch.autocast("tarry") treats each operator as CUDA's autocast does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def kernels(key: str) -> set[str]:
    return {name for name in torch._C._dispatch_get_registrations_for_dispatch_key(key) if name.startswith("aten::")}


def test_the_same_operators_as_on_cuda() -> None:
    cuda = {name for name in kernels("AutocastCUDA") if "cudnn" not in name}
    assert len(cuda) > 100
    assert kernels("AutocastPrivateUse1") == cuda


def listed(macro: str) -> list[str]:
    """Names of operators in one of the lists of PyTorch's header: `_(pow, Scalar)` is `pow.Scalar`."""
    text = HEADER.read_text().split(f"#define {macro}(_)", 1)[1]
    body = re.match(r"(?:.*\\\n)*.*\n", text)
    assert body is not None
    return [name.replace(", ", ".") for name in re.findall(r"_\((\w+(?:, \w+)?)\)", body.group())]


def a(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    return torch.rand(shape or (4, 4), device="tarry").to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 3).to("tarry")
    with torch.autocast("tarry", dtype=dtype):
        assert (a() @ a()).dtype == dtype
        assert layer(a()).dtype == dtype
        assert torch.nn.functional.conv1d(a(torch.float32, 1, 4, 8), a(torch.float32, 2, 4, 3)).dtype == dtype
        assert (
            torch.baddbmm(a(torch.float32, 2, 4, 4), a(torch.float32, 2, 4, 4), a(torch.float32, 2, 4, 4)).dtype
            == dtype
        )
    assert (a() @ a()).dtype == torch.float32


def test_default_type_is_half() -> None:
    with torch.autocast("tarry"):
        assert (a() @ a()).dtype == torch.float16


def test_full_precision() -> None:
    half = a(torch.float16)
    with torch.autocast("tarry"):
        for result in (
            half.exp(),
            half.pow(2),
            half.softmax(-1),
            half.sum(),
            half.cumsum(0),
            half.norm(),
            half.norm(2, dim=1),
            torch.nn.functional.layer_norm(half, (4,)),
            torch.nn.functional.mse_loss(half, half),
        ):
            assert result.dtype == torch.float32
        assert half.sum(dtype=torch.float16).dtype == torch.float16
    assert half.exp().dtype == torch.float16


def test_widest_type() -> None:
    with torch.autocast("tarry"):
        assert torch.addcmul(a(), a(torch.float16), a(torch.float16)).dtype == torch.float32
        assert torch.addcmul(a(torch.float16), a(torch.float16), a(torch.float16)).dtype == torch.float16
        assert torch.dot(a(torch.float16, 4), a(torch.float32, 4)).dtype == torch.float32


def test_other_types_are_left_alone() -> None:
    with torch.autocast("tarry"):
        assert (a(torch.float64) @ a(torch.float64)).dtype == torch.float64
        assert (a() + a()).dtype == torch.float32
        assert (torch.rand(3, 3) @ torch.rand(3, 3)).dtype == torch.float32  # the CPU's autocast is another switch


def test_nested_and_disabled() -> None:
    with torch.autocast("tarry", dtype=torch.bfloat16):
        with torch.autocast("tarry", enabled=False):
            assert (a() @ a()).dtype == torch.float32
        assert (a() @ a()).dtype == torch.bfloat16


def test_binary_cross_entropy_is_refused_with_the_cure() -> None:
    probability, target = a(), a()
    with torch.autocast("tarry"):
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            torch.nn.functional.binary_cross_entropy(probability, target)
        torch.nn.functional.binary_cross_entropy_with_logits(a(), target)
    torch.nn.functional.binary_cross_entropy(probability, target)


def test_unsupported_type_warns_and_does_nothing() -> None:
    with pytest.warns(UserWarning, match="target dtype is not supported"), torch.autocast("tarry", dtype=torch.float64):
        assert (a() @ a()).dtype == torch.float32


def test_gradients_come_in_the_parameters_type() -> None:
    layer = torch.nn.Linear(4, 4).to("tarry")
    with torch.autocast("tarry", dtype=torch.bfloat16):
        loss = layer(layer(a())).float().sum()
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert torch.isfinite(layer.weight.grad).all().item()


def test_values_are_those_of_the_cpu_in_that_type() -> None:
    x, w = torch.rand(8, 8), torch.rand(8, 8)
    with torch.autocast("tarry", dtype=torch.bfloat16):
        actual = (x.to("tarry") @ w.to("tarry")).softmax(-1)
    expected = (x.bfloat16() @ w.bfloat16()).softmax(-1, dtype=torch.float32)
    torch.testing.assert_close(actual.cpu(), expected)


@pytest.mark.parametrize(
    "macro", ["AT_FORALL_LOWER_PRECISION_FP", "AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE", "AT_FORALL_PROMOTE"]
)
def test_every_listed_operator_has_a_kernel(macro: str) -> None:
    names = listed(macro)
    assert len(names) > 5
    assert {f"aten::{name}" for name in names} <= kernels("AutocastPrivateUse1")


def test_grad_scaler_skips_what_overflows_and_trains_the_rest() -> None:
    layer = torch.nn.Linear(4, 1).to("tarry")
    before = layer.weight.detach().cpu()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("tarry", init_scale=4.0)

    def step(factor: float) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("tarry", dtype=torch.float16):
            loss = layer(torch.ones(2, 4, device="tarry")).float().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return layer.weight.detach().cpu()

    skipped = step(float("inf"))
    assert torch.equal(skipped, before)
    assert scaler.get_scale() == 2.0
    torch.testing.assert_close(step(1.0), before - 0.1)
    assert scaler.get_scale() == 2.0
