"""Operators that `torch.library` declares, on tarry; and tarry's operators in the hands of `torch.library`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tarry
from tarry.errors import CustomOpCheckError
from tests.support import both, fallbacks

USES_DEVICE = True


def numpy_sin(x: Tensor) -> Tensor:
    return torch.from_numpy(__import__("numpy").sin(x.numpy()))


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("optest", "FRAGMENT") as made:
        yield made


# ---- kernels for all devices that need real tensors


def _custom_op(fake: bool, library: torch.library.Library) -> Callable[..., Any]:
    op = torch.library.custom_op("optest::of_torch", numpy_sin, mutates_args=())
    if fake:
        op.register_fake(torch.empty_like)
    return op


def _library_impl(fake: bool, library: torch.library.Library) -> Callable[..., Any]:
    library.define("of_library(Tensor x) -> Tensor")
    library.impl("of_library", numpy_sin, "CompositeExplicitAutograd")
    if fake:
        torch.library.register_fake("optest::of_library", torch.empty_like, lib=library)
    return torch.ops.optest.of_library.default


@pytest.mark.parametrize("make", [_custom_op, _library_impl])
@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("backend", ["eager", "torchscript", "inductor"])
def test_a_kernel_that_needs_real_tensors(make: Any, fake: bool, backend: str, library: torch.library.Library) -> None:
    tarry.set_backend(backend)
    op = make(fake, library)
    x = torch.linspace(0, 1, 5)
    lazy = op(x.to("tarry") * 2) + 1
    if fake:
        assert tarry.explain(lazy).count("optest::of_") == 1  # one node
    torch.testing.assert_close(lazy.cpu(), (x * 2).sin() + 1)
    assert bool(fallbacks()) is not fake


def test_it_writes_and_has_gradients() -> None:
    @torch.library.custom_op("optest::double_", mutates_args=("x",))
    def double_(x: Tensor) -> None:
        x.numpy()[...] *= 2

    x = torch.ones(4, device="tarry")
    double_(x[1:3])
    assert x.tolist() == [1, 2, 2, 1]
    assert not fallbacks()

    op = torch.library.custom_op("optest::differentiated", numpy_sin, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    y = torch.ones(3, device="tarry", requires_grad=True)
    op(y).sum().backward()
    torch.testing.assert_close(y.grad.cpu(), torch.ones(3).cos())  # type: ignore[union-attr]


def test_a_wrong_call_raises_the_kernels_error() -> None:
    def picky(x: Tensor) -> Tensor:
        raise ValueError("not this one")

    op = torch.library.custom_op("optest::picky", picky, mutates_args=())
    with pytest.raises(ValueError, match="not this one"):
        op(torch.ones(2, device="tarry"))


def test_an_operator_made_of_others_is_taken_apart(library: torch.library.Library) -> None:
    library.define("composite(Tensor x) -> Tensor")
    library.impl("composite", lambda x: x * 2, "CompositeImplicitAutograd")
    lazy = torch.ops.optest.composite(torch.ones(2, device="tarry"))
    assert "optest::composite" not in tarry.explain(lazy)


@pytest.mark.parametrize(
    "keys", [("CPU",), ("CPU", "Meta"), ("CompositeExplicitAutograd",), ("CompositeImplicitAutograd",)]
)
def test_a_view_is_one_of_its_argument(keys: tuple[str, ...], library: torch.library.Library) -> None:
    library.define("rest(Tensor(a) x) -> Tensor(a)")
    library.define("halves(Tensor(a) x) -> (Tensor(a), Tensor(a))")
    for key in keys:
        library.impl("rest", lambda x: x[1:], key)
        library.impl("halves", lambda x: tuple(x.chunk(2)), key)

    def program(x: Tensor) -> list[Tensor]:
        x = x.clone()
        column = x.t()[1]  # neither at the beginning nor contiguous
        rest = torch.ops.optest.rest(column)
        left, right = torch.ops.optest.halves(rest)
        rest.add_(1)
        right.mul_(2)
        x[3] = 7
        left.sub_(3)
        return [x, column, rest, left, right]

    both(program, torch.arange(20.0).view(5, 4))


def test_a_kernel_for_tarry_comes_first() -> None:
    op = torch.library.custom_op("optest::both", numpy_sin, mutates_args=())
    op.register_kernel("tarry")(lambda x: x + 1)
    assert op(torch.ones(2, device="tarry")).tolist() == [2, 2]


def test_a_library_that_goes_takes_the_recording_along() -> None:
    for body in (lambda x: x * 3, lambda x: x * 5):
        with torch.library._scoped_library("optest", "FRAGMENT") as made:
            made.define("gone(Tensor x) -> Tensor")
            made.impl("gone", body, "CompositeImplicitAutograd" if body(1) == 5 else "CompositeExplicitAutograd")
            x = torch.ones(2, device="tarry", requires_grad=body(1) == 5)
            result = torch.ops.optest.gone(x)
            assert result.tolist() == [body(1)] * 2
            assert ("optest::gone" in tarry.explain(result)) is False
            assert result.requires_grad == (body(1) == 5)


@pytest.mark.process
def test_one_that_was_declared_before_tarry_was_imported() -> None:
    program = """
import torch
def f(x: torch.Tensor) -> torch.Tensor: return torch.from_numpy(x.numpy() * 2)
op = torch.library.custom_op("optest::early", f, mutates_args=())
import tarry
tarry.set_backend("eager")
print(op(torch.ones(2, device="tarry")).tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[2.0, 2.0]"


# ---- tarry.lower


def test_a_lowering_for_an_operator_of_others(library: torch.library.Library) -> None:
    tarry.set_backend("torchscript")
    for make in (_custom_op, _library_impl):
        op = make(True, library)
        name = "of_torch" if make is _custom_op else "of_library"
        tarry.lower(f"optest::{name}", "torchscript")(torch.sin)
        lazy = op(torch.ones(3, device="tarry"))
        assert "aten::sin" in tarry.explain(lazy, stage="compiled")
        torch.testing.assert_close(lazy.cpu(), torch.ones(3).sin())


def test_what_tarry_lower_refuses(library: torch.library.Library) -> None:
    with pytest.raises(ValueError, match="there is no operator 'optest::nowhere'"):
        tarry.lower("optest::nowhere", "inductor")
    library.define("parts(Tensor x) -> Tensor")
    library.impl("parts", lambda x: x * 2, "CompositeImplicitAutograd")
    with pytest.raises(ValueError, match="PyTorch takes it apart"):
        tarry.lower("optest::parts", "inductor")


# ---- tarry's operators in the hands of torch.library


@pytest.mark.parametrize("form", ["object", "name", "overload"])
def test_torch_library_registers_everything(form: str) -> None:
    @tarry.custom_op("optest::mine")
    def mine(x: Tensor) -> Tensor: ...

    op: Any = {"object": mine, "name": "optest::mine", "overload": mine._overload}[form]
    torch.library.register_kernel(op, "cpu", numpy_sin)
    torch.library.register_fake(op, torch.empty_like)
    torch.library.register_autograd(
        op,
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    torch.library.register_vmap(op, lambda info, dims, x: (mine(x), dims[0]))
    torch.library.register_autocast(op, "cpu", torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"there is a cpu impl already, registered at .*test_others\.py"):
        torch.library.register_kernel(op, "cpu", torch.sin)
    x = torch.ones(2, 3, requires_grad=True)
    checked = torch.library.opcheck(mine._overload if form == "name" else op, (x,))
    assert set(checked.values()) == {"SUCCESS"}
    mine.check(x)
    torch.testing.assert_close(torch.vmap(mine)(x.detach()), x.detach().sin())
    for device in ("cpu", "tarry"):
        leaf = torch.ones(2, device=device, requires_grad=True)
        mine(leaf).sum().backward()
        torch.testing.assert_close(leaf.grad.cpu(), torch.ones(2).cos())  # type: ignore[union-attr]


def test_a_wrong_gradient_of_torch_library_is_found() -> None:
    @tarry.custom_op("optest::wrong")
    def wrong(x: Tensor) -> Tensor: ...

    wrong.register_kernel(None)(numpy_sin)
    wrong.register_fake(torch.empty_like)
    wrong.register_autograd(lambda ctx, grad: grad * 2)
    with pytest.raises(CustomOpCheckError, match="disagrees with finite differences"):
        wrong.check(torch.ones(3))
    with pytest.raises(RuntimeError, match="already has an autograd kernel"):
        wrong.impl_backward()(lambda ctx, saved, grad: None)
    with pytest.raises(NotImplementedError, match="cannot be switched off"):
        wrong.set_kernel_enabled("cpu", False)
