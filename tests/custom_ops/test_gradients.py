"""Gradients: what the functions are given, what they have to return, and that nothing is paid when none is wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tarry
from tarry.custom_ops import CustomOp
from tarry.errors import CustomOpCheckError
from tests.custom_ops import operators
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


# ---- forward mode


@pytest.mark.parametrize("device", ["cpu", "tarry"])
def test_forward_mode_needs_a_backward_function_only(device: str) -> None:
    op = cube()
    x, t = torch.tensor([1.0, 2.0], device=device), torch.tensor([1.0, 10.0], device=device)
    for mode in (torch.enable_grad, torch.no_grad):
        with torch.autograd.forward_ad.dual_level(), mode():
            dual = torch.autograd.forward_ad.make_dual(x, t)
            assert torch.autograd.forward_ad.unpack_dual(op(dual)).tangent.tolist() == [3.0, 120.0]
    assert torch.func.jacfwd(op)(x).tolist() == [[3.0, 0.0], [0.0, 12.0]]
    assert torch.func.hessian(lambda x: op(x).sum())(x).tolist() == [[6.0, 0.0], [0.0, 12.0]]


def test_forward_mode_by_finite_differences() -> None:
    op = operators.scaled_pair()
    inputs = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda x, y: op([x, y], 2.0), inputs, check_forward_ad=True)


def test_forward_mode_is_refused_where_it_would_be_wrong() -> None:
    x = torch.tensor([1.0, 2.0])
    with pytest.raises(NotImplementedError, match="within forward-mode"):
        torch.func.jacfwd(torch.func.jacfwd(cube()))(x)

    @tarry.custom_op("optest::opaque")
    def opaque(x: Tensor) -> Tensor: ...

    opaque.impl("cpu")(torch.sin)
    opaque.impl_abstract()(torch.empty_like)
    with pytest.raises(RuntimeError, match="Autograd has not been implemented"):
        torch.func.jvp(opaque, (x,), (x,))
    opaque.impl_save_for_backward()(lambda inputs, output: inputs.x)
    opaque.impl_backward()(lambda ctx, saved, grad: {"x": grad.detach() * saved.cos()})
    with pytest.raises(NotImplementedError, match="backward function that can itself be differentiated"):
        torch.func.jvp(opaque, (x,), (x,))


# ---- writes and views


@pytest.mark.parametrize("device", ["cpu", "tarry"])
def test_the_gradient_of_a_write(device: str) -> None:
    def run(multiply: Any) -> list[Any]:
        a = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
        b = torch.tensor([3.0, 4.0], device=device, requires_grad=True)
        x = a * 2
        total = multiply(x[1:], b)  # in place, through a view
        (x * x).sum().add(total).backward()
        assert a.grad is not None
        assert b.grad is not None
        return [x.tolist(), a.grad.tolist(), b.grad.tolist()]

    op = operators.multiply_()
    assert run(op) == run(lambda x, y: x.mul_(y).sum())
    op.check(torch.randn(3), torch.randn(3))
    assert torch.func.jvp(lambda x: op(x.clone(), x), (torch.ones(2),), (torch.ones(2),))[1].item() == 4.0
    leaf = torch.ones(2, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        op(leaf, torch.ones(2, device=device) * 2)
    assert leaf.tolist() == [1.0, 1.0]
    shared = torch.ones(3, device=device, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="x, which shares memory with y"):
        op(shared[:2], shared[1:])
    op(shared[:1], shared[2:])


def test_a_wrong_gradient_of_a_write_is_found() -> None:
    op = operators.multiply_(slope=2.0)
    with pytest.raises(CustomOpCheckError, match="disagrees with finite differences"):
        op.check(torch.randn(3), torch.randn(3))


@pytest.mark.parametrize("device", ["cpu", "tarry"])
def test_views_have_gradients_without_functions(device: str) -> None:
    op = operators.diagonal()
    x = torch.arange(9.0, device=device).reshape(3, 3).t().requires_grad_()
    (op(x) ** 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == torch.diag(torch.tensor([0.0, 8.0, 16.0])).tolist()
    leaf = torch.ones(3, 3, device=device, requires_grad=True)
    changed = leaf * 1
    op(changed).mul_(5)
    changed.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == (torch.ones(3, 3) + 4 * torch.eye(3)).tolist()
    assert torch.func.jvp(op, (x.detach(),), (x.detach(),))[1].tolist() == [0.0, 4.0, 8.0]
