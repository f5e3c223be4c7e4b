"""What can be registered for an operator, by whom, and how often. The functional forms and the methods do the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tarry
from tarry import _custom_ops as functional
from tarry._custom_op import impl as original
from tarry.custom_ops import CustomOp
from tarry.custom_ops.registry import get_op

USES_DEVICE = True
NAME = "optest::f"


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """An operator of another library."""
    made = torch.library.Library("optest", "FRAGMENT")
    made.define("f(Tensor x) -> Tensor")
    yield made
    made._destroy()


def declared() -> CustomOp:
    @tarry.custom_op(NAME)
    def f(x: Tensor) -> Tensor: ...

    return f


def test_the_functional_forms() -> None:
    @functional.custom_op(NAME)
    def f(x: Tensor, k: int) -> Tensor:
        raise NotImplementedError

    @functional.impl(NAME, device_types="cpu")
    def f_cpu(x, k):
        return x * k

    @functional.impl_abstract(NAME)
    def f_abstract(x, k):
        return torch.empty_like(x)

    functional.impl_save_for_backward(NAME, func=lambda inputs, output: inputs.k)
    functional.impl_backward(NAME, func=lambda ctx, saved, grad: {"x": grad * saved})
    x = torch.ones(2, requires_grad=True)
    torch.ops.optest.f(x, 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
    assert get_op(NAME)(torch.ones(2, device="meta"), 3).shape == (2,)
    functional._destroy(NAME)
    with pytest.raises(ValueError, match="there is no operator 'optest::f'"):
        get_op(NAME)


def test_the_decorator_of_the_old_interface() -> None:
    @original.custom_op(NAME, "(Tensor x) -> Tensor")
    def f(x):
        """Its own words."""

    assert isinstance(f, original.CustomOp)
    assert f.__doc__ == "Its own words."
    assert f.__name__ == "f"
    f.impl("cpu")(torch.sin)
    assert torch.equal(f(torch.ones(2)), torch.ones(2).sin())
    assert original.get_abstract_impl(NAME) is None
    assert original._find_custom_op(NAME) is f
    with pytest.raises(RuntimeError, match="there is no custom operator 'optest::g'"):
        original._find_custom_op("optest::g")


def test_the_old_interface_is_functional() -> None:
    for schema in ("(Tensor(a!) x) -> Tensor", "(Tensor(a) x) -> Tensor(a)", "(Tensor x) -> ()"):
        with pytest.raises(ValueError, match="only supports functional operators"):
            functional.custom_op(NAME, schema)
    with pytest.raises(ValueError, match="named 'self'"):
        functional.custom_op(NAME, "(Tensor self) -> Tensor")
    with pytest.raises(AssertionError, match="Invalid function schema"):
        functional.custom_op(NAME, "(")
    for function, says in (
        (lambda y: y, "signature to match"),
        (lambda *x: x, "not supported"),
        (lambda x=1: x, "default arguments"),
    ):
        function.__name__ = "f"
        with pytest.raises(ValueError, match=says):
            original.custom_op(NAME, "(Tensor x) -> Tensor")(function)

    def f(x: Tensor) -> Tensor: ...

    with pytest.raises(ValueError, match="no type annotations"):
        original.custom_op(NAME, "(Tensor x) -> Tensor")(f)


def test_the_constructor_is_private() -> None:
    arguments: Any = (None, None, None, None, None)
    with pytest.raises(RuntimeError, match="constructor is private"):
        CustomOp(*arguments)


def test_devices() -> None:
    f = declared()
    for device in ("hip", "vulkan"):
        with pytest.raises(ValueError, match="we only support device_type in"):
            f.impl(device)
    with pytest.raises(ValueError, match="impl_abstract"):
        f.impl(["cpu", "meta"])
    f.impl(["cpu", "cuda", "tarry"])(torch.sin)
    x = torch.ones(2, device="tarry")
    assert "optest" not in tarry.explain(f(x))  # its own kernel for tarry wins: aten::sin is recorded


def test_registered_twice_says_where_the_first_is() -> None:
    f = declared()
    here = re.escape(__file__)
    for register in (
        lambda: f.impl("cpu")(torch.sin),
        lambda: f.impl_abstract()(torch.empty_like),
        lambda: f.impl_factory()(torch.zeros),
        lambda: f.impl_save_for_backward()(lambda inputs, output: None),
        lambda: f.impl_backward()(lambda ctx, saved, grad: None),
        lambda: f.impl_vmap()(lambda info, in_dims, x: None),
        lambda: f.impl_autocast("cpu", torch.bfloat16),
        lambda: f.lower("inductor")(torch.sin),
        lambda: functional.impl(NAME, device_types="cuda", func=torch.sin),
    ):
        register()
        line = register.__code__.co_firstlineno
        with pytest.raises(RuntimeError, match=rf"already, registered at {here}:{line}"):
            register()


def test_missing_kernels_say_what_to_register() -> None:
    f = declared()
    with pytest.raises(NotImplementedError, match=r"no cpu impl registered.*impl\('cpu'\)"):
        f(torch.ones(2))
    with pytest.raises(NotImplementedError, match="no fake impl or Meta kernel"):
        f(torch.ones(2, device="meta"))

    @tarry.custom_op("optest::zeros")
    def zeros(sizes: list[int]) -> Tensor: ...

    with pytest.raises(NotImplementedError, match=r"no Tensor inputs.*impl_factory"):
        zeros([2])
    zeros.impl_factory()(torch.zeros)
    assert zeros([2]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("key", ["CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd"])
def test_a_kernel_of_somebody_else(library: torch.library.Library, key: str) -> None:
    library.impl("f", torch.sin, key)
    with pytest.raises(RuntimeError, match="already has an implementation for this device type"):
        functional.impl(NAME, device_types="cpu", func=torch.sin)


def test_an_abstract_implementation_of_somebody_else(library: torch.library.Library) -> None:
    library.impl("f", torch.sin, "Meta")
    with pytest.raises(RuntimeError, match="already has a DispatchKey::Meta implementation"):
        functional.impl_abstract(NAME, func=torch.empty_like)


@pytest.mark.parametrize("key", ["Autograd", "AutogradCPU", "CompositeImplicitAutograd"])
def test_a_gradient_of_somebody_else(library: torch.library.Library, key: str) -> None:
    library.impl("f", lambda x: x.sin(), key)
    with pytest.raises(RuntimeError, match=f"DispatchKey::{key}"):
        functional.impl_backward(NAME, func=lambda ctx, saved, grad: None)
    if key == "CompositeImplicitAutograd":
        with pytest.raises(RuntimeError, match="needs no abstract implementation"):
            functional.impl_abstract(NAME, func=torch.empty_like)


def test_more_for_an_operator_of_somebody_else(library: torch.library.Library) -> None:
    functional.impl(NAME, device_types="cpu", func=torch.sin)
    functional.impl_save_for_backward(NAME, func=lambda inputs, output: inputs.x)
    functional.impl_backward(NAME, func=lambda ctx, saved, grad: {"x": grad * saved.cos()})
    x = torch.ones(2, requires_grad=True)
    get_op(NAME)(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.ones(2).cos())


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("(Tensor(a) x) -> Tensor(a)", "returns views"),
        ("(Tensor x) -> ()", "no returns"),
        ("(Tensor x) -> str", "returns a str"),
    ],
)
def test_operators_that_cannot_have_a_gradient(schema: str, says: str) -> None:
    def g(x): ...

    op = tarry.custom_op("optest::g", schema)(g)
    for register in (op.impl_save_for_backward(), op.impl_backward()):
        with pytest.raises(RuntimeError, match=says):
            register(lambda *args: None)
