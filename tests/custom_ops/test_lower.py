"""Lowerings: what an operator is made of for one backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tarry
from tarry.custom_ops import CustomOp
from tarry.errors import CustomOpCheckError
from tests.custom_ops.operators import axpy_, diagonal, multiply_
from tests.support import fallbacks

USES_DEVICE = True


@pytest.fixture(autouse=True)
def _torchscript() -> Iterator[None]:
    before = tarry.get_backend()
    tarry.set_backend("torchscript")
    yield
    tarry.set_backend(before)


def swish(calls: list[str]) -> CustomOp:
    @tarry.custom_op("optest::swish")
    def swish(x: Tensor, beta: float) -> Tensor: ...

    @swish.impl("cpu")
    def _(x, beta):
        calls.append("kernel")
        return x * torch.sigmoid(beta * x)

    swish.impl_abstract()(lambda x, beta: torch.empty_like(x))
    return swish


def run(op: CustomOp, beta: float) -> tuple[Tensor, Tensor, str]:
    x = torch.linspace(-2, 2, 5)
    lazy = op(x.to("tarry"), beta) + 1
    text = tarry.explain(lazy, stage="compiled")
    return lazy.cpu(), x * torch.sigmoid(beta * x) + 1, text


def test_in_terms_of_graph_operators() -> None:
    calls: list[str] = []
    op = swish(calls)

    @op.lower("torchscript")
    def _(x, beta):
        return x * torch.sigmoid(x * beta)

    for beta in (1.0, 2.0):
        found, expected, text = run(op, beta)
        torch.testing.assert_close(found, expected)
        assert "aten::sigmoid" in text
        assert "swish" not in text
    assert calls == []
    assert not fallbacks()


def test_as_a_kernel_of_its_own() -> None:
    calls: list[str] = []
    op = swish(calls)

    @op.lower("torchscript", kernel=True)
    def _(x, beta):
        assert x.device.type == "cpu"
        calls.append("lowered")
        return x * torch.sigmoid(beta * x)

    found, expected, text = run(op, 1.5)
    torch.testing.assert_close(found, expected)
    assert "aten::sigmoid" not in text
    assert calls == ["lowered"]
    assert not fallbacks()


def test_other_backends_keep_the_kernel() -> None:
    calls: list[str] = []
    op = swish(calls)
    op.lower("inductor")(lambda x, beta: x * 0)
    found, expected, _ = run(op, 1.0)
    torch.testing.assert_close(found, expected)
    assert calls == ["kernel"]


def test_a_lowering_that_comes_late_is_heard() -> None:
    calls: list[str] = []
    op = swish(calls)
    run(op, 1.0)
    assert calls == ["kernel"]
    op.lower("torchscript")(lambda x, beta: x * torch.sigmoid(x * beta))
    found, expected, _ = run(op, 1.0)
    torch.testing.assert_close(found, expected)
    assert calls == ["kernel"]


def test_a_lowering_of_other_types_is_not_used() -> None:
    calls: list[str] = []
    op = swish(calls)
    op.lower("torchscript")(lambda x, beta: (x * beta).sum())
    with pytest.warns(UserWarning, match="decomposition of optest::swish is not used: it gives"):
        found, expected, _ = run(op, 1.0)
    torch.testing.assert_close(found, expected)


def test_gradients_go_through_the_lowered_operator() -> None:
    calls: list[str] = []
    op = swish(calls)
    op.impl_save_for_backward()(lambda inputs, output: (inputs.x, inputs.beta))

    @op.impl_backward()
    def _(ctx, saved, grad):
        x, beta = saved
        gate = torch.sigmoid(beta * x)
        return {"x": grad * (gate + x * beta * gate * (1 - gate))}

    op.lower("torchscript")(lambda x, beta: x * torch.sigmoid(x * beta))

    def gradient(device: str) -> Tensor:
        x = torch.linspace(-2, 2, 5).to(device).requires_grad_()
        op(x, 1.0).sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    torch.testing.assert_close(gradient("tarry"), gradient("cpu"))
    assert calls == ["kernel"]  # of the run on the CPU


@pytest.mark.slow
def test_inductor_fuses_a_lowering() -> None:
    tarry.set_backend("inductor")
    calls: list[str] = []
    op = swish(calls)
    op.lower("inductor")(lambda x, beta: x * torch.sigmoid(x * beta))
    found, expected, text = run(op, 1.0)
    torch.testing.assert_close(found, expected)
    assert "swish" not in text
    assert text.count("async_compile.cpp_pybinding(") == 1
    assert calls == []


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("backend", ["torchscript", "inductor"])
def test_an_operator_that_writes(backend: str, kernel: bool) -> None:
    tarry.set_backend(backend)
    op = axpy_()
    op.lower(backend, kernel=kernel)(lambda x, y, a: y + a * x)
    two = multiply_()
    two.lower(backend, kernel=kernel)(lambda x, y: ((x * y).sum(), x * y))
    y = torch.ones(4, device="tarry")
    op(torch.ones(2, device="tarry"), y[1:3], 3.0)
    total = two(y, y + 1)
    text = tarry.explain(total, y, stage="compiled")
    assert "optest::axpy_" not in text.replace("tarry_lowered", "")
    assert (total.item(), y.tolist()) == (44.0, [2.0, 20.0, 20.0, 2.0])
    op.check(torch.randn(3), torch.randn(3), 2.0)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("backend", ["torchscript", "inductor"])
def test_check_finds_a_wrong_lowering(backend: str, kernel: bool) -> None:
    """Whatever backend is in use: the wrong values would come when the program takes over."""
    tarry.set_backend("eager")
    op = swish([])
    op.lower("torchscript")(lambda x, beta: x * torch.sigmoid(beta * x))
    op.check(torch.randn(4), 2.0)
    other = axpy_()
    other.lower(backend, kernel=kernel)(lambda x, y, a: y + a * x * 1.01)
    with pytest.raises(CustomOpCheckError, match=f"lowering: for backend '{backend}', y has other values"):
        other.check(torch.randn(3), torch.randn(3), 2.0)
    assert tarry.get_backend().name == "eager"


def test_check_finds_lowerings_that_are_not_used_or_raise() -> None:
    op = swish([])
    op.lower("torchscript")(lambda x, beta: x.sum())
    with pytest.raises(CustomOpCheckError, match="decomposition of optest::swish is not used: it gives"):
        op.check(torch.randn(4), 2.0)

    def fail(x, beta):
        raise ValueError("no")

    other = axpy_()
    other.lower("inductor", kernel=True)(fail)
    with pytest.raises(CustomOpCheckError, match="lowering: for backend 'inductor', it raises"):
        other.check(torch.randn(3), torch.randn(3), 2.0)


def test_what_cannot_be_lowered() -> None:
    with pytest.raises(ValueError, match="runs the operator's own kernels"):
        swish([]).lower("eager")
    with pytest.raises(ValueError, match="a view is no node of a graph"):
        diagonal().lower("inductor")

    @tarry.custom_op("optest::bare")
    def bare(x: Tensor) -> Tensor: ...

    register: Any = bare.lower("inductor", kernel=True)
    with pytest.raises(RuntimeError, match="register impl_abstract before a kernel"):
        register(torch.sin)


def test_a_backend_that_there_is_not() -> None:
    op = swish([])
    with pytest.raises(ValueError, match=r"no backend 'indutcor'\. Did you mean 'inductor'"):
        op.lower("indutcor")
    assert callable(op.lower("dynamo:anything"))
    assert callable(op.lower("of_my_own"))  # it may be registered later
