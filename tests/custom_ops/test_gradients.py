"""Gradients: what the functions are given, what they have to return, and that nothing is paid when none is wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tarry
from tarry.custom_ops import CustomOp
from tests.custom_ops.operators import cube

USES_DEVICE = True


def declared(backward: Any, save: Any = lambda inputs, output: inputs, **options: Any) -> CustomOp:
    @tarry.custom_op("optest::f", exist_ok=True)
    def f(
        x: Tensor, ys: list[Tensor], z: Tensor | None, n: int, *, w: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    @f.impl("cpu")
    def _(x, ys, z, n, *, w=None):
        return x * n + sum(ys) + (0 if w is None else w), x.sum()

    f.impl_save_for_backward()(save)
    f.impl_backward(**options)(backward)
    return f


def leaves(count: int = 3) -> list[Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(count)]


def test_what_the_functions_are_given() -> None:
    seen: dict[str, Any] = {}

    def save(inputs: Any, output: Any) -> Any:
        seen["names"] = inputs._fields
        seen["output"] = output
        return {"n": inputs.n, "tensors": [inputs.x, output[0]]}

    def backward(ctx: Any, saved: Any, first: Tensor, second: Tensor) -> Any:
        seen["saved"], seen["needs"], seen["second"] = saved, dict(ctx.needs_input_grad), second
        return {"x": first * saved["n"], "ys": [first, None], "z": None, "w": first}

    x, y, w = leaves()
    f = declared(backward, save)
    f(x, [y, torch.ones(2)], None, 3, w=w)[0].sum().backward()
    assert seen["names"] == ("x", "ys", "z", "n", "w")
    assert seen["saved"]["n"] == 3
    assert seen["saved"]["tensors"][0] is x
    assert seen["needs"] == {"x": True, "ys": True, "z": False, "n": False, "w": True}
    assert seen["second"].item() == 0.0  # there was no gradient
    assert [t.grad.tolist() for t in (x, y, w)] == [[3.0, 3.0], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (torch.ones(2), "to be a dict"),
        ({"x": None}, r"to have keys \{.*'ys'.*\}"),
        ({"x": None, "ys": [None, None], "z": None, "w": None, "n": None}, "non-Tensor-like types have none"),
        ({"x": (torch.ones(2),), "ys": [None, None], "z": None, "w": None}, "either None or a Tensor for argument 'x'"),
        ({"x": None, "ys": None, "z": None, "w": None}, "a list of gradients for argument 'ys'"),
        ({"x": None, "ys": [None], "z": None, "w": None}, "'ys' of 2 gradients but got 1"),
        ({"x": None, "ys": [None, 1.0], "z": None, "w": None}, "element 1 of argument 'ys'.*returned a float"),
        ({"x": None, "ys": [None, None], "z": torch.ones(2), "w": None}, "'z', which was not a Tensor but a NoneType"),
    ],
)
def test_what_backward_returns_is_checked(returned: Any, says: str) -> None:
    f = declared(lambda ctx, saved, *grads: returned)
    with pytest.raises(RuntimeError, match=rf"(?s)registered at .*test_gradients.py:\d+, .*{says}"):
        f(torch.ones(2, requires_grad=True), [torch.ones(2), torch.ones(2)], None, 3)[0].sum().backward()


def test_output_differentiability() -> None:
    def backward(ctx: Any, saved: Any, first: Tensor, second: Tensor) -> Any:
        return {"x": first, "ys": [None], "z": None, "w": None}

    f = declared(backward, output_differentiability=[True, False])
    first, second = f(torch.ones(2, requires_grad=True), [torch.ones(2)], None, 1)
    assert first.requires_grad
    assert not second.requires_grad
    for wrong in (True, [True], [1, 0]):
        with pytest.raises(RuntimeError, match=r"output_differentiability.* takes a list of 2 bools"):
            f.impl_backward(output_differentiability=wrong)  # type: ignore[arg-type]

    @tarry.custom_op("optest::g")
    def g(x: Tensor) -> tuple[Tensor, int]: ...

    g.impl("cpu")(lambda x: (x.clone(), 3))
    g.impl_save_for_backward()(lambda inputs, output: None)
    g.impl_backward(output_differentiability=[True, True])(lambda ctx, saved, *grads: {"x": grads[0]})
    with pytest.raises(RuntimeError, match="result 1 is differentiable, but it is not a Tensor"):
        g(torch.ones(2, requires_grad=True))


def test_half_a_gradient_and_none() -> None:
    @tarry.custom_op("optest::g")
    def g(x: Tensor) -> Tensor: ...

    g.impl("cpu")(torch.sin)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="Autograd has not been implemented for operator optest::g"):
        g(x)
    assert not g(x.detach()).requires_grad
    with torch.no_grad():
        assert not g(x).requires_grad
    g.impl_backward()(lambda ctx, saved, grad: {"x": grad})
    with pytest.raises(RuntimeError, match="unable to find a 'save_for_backward' function"):
        g(x)


@pytest.mark.parametrize("device", ["cpu", "tarry"])
def test_second_derivatives(device: str) -> None:
    x = torch.tensor([2.0, 3.0], device=device, requires_grad=True)
    (first,) = torch.autograd.grad(cube()(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [12.0, 18.0]


def test_no_python_runs_when_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    f = cube()

    def fail(*args: Any) -> None:
        raise AssertionError("the rule was called")

    monkeypatch.setattr("tarry.custom_ops.autograd._apply", fail)
    assert f(torch.full((2,), 2.0)).tolist() == [8.0, 8.0]
    with torch.no_grad():
        f(torch.ones(2, requires_grad=True))
    with pytest.raises(AssertionError, match="the rule was called"):
        f(torch.ones(2, requires_grad=True))


def test_forward_mode_is_refused_and_not_dropped() -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(RuntimeError, match="jvp"):
            cube()(dual)
