"""Code written for `torch._custom_op` and `torch._custom_ops` finds the same names and arguments here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tarry import _custom_ops
from tarry._custom_op import impl

USES_DEVICE = True


def test_stacklevels_are_taken() -> None:
    @impl.custom_op("optest::f")
    def f(x: Tensor) -> Tensor: ...

    f.impl("cpu", _stacklevel=3)(lambda x: x * 2)
    f.impl_abstract(_stacklevel=3)(torch.empty_like)
    f.impl_save_for_backward(_stacklevel=3)(lambda inputs, output: None)
    f.impl_backward(None, _stacklevel=3)(lambda ctx, saved, grad: {"x": grad * 2})
    x = torch.ones(1, requires_grad=True)
    f(x).backward()
    assert x.grad is not None
    assert x.grad.item() == 2.0
    assert __file__ in f._get_impl("cpu").location


def test_operators_of_others_by_keyword() -> None:
    library = torch.library.Library("optest", "FRAGMENT")
    library.define("theirs(Tensor x) -> Tensor")
    op = impl.custom_op_from_existing(op=torch.ops.optest.theirs.default)
    op.impl("cpu")(lambda x: x * 3)
    assert torch.ops.optest.theirs(torch.ones(1)).item() == 3.0
    op.remove()
    library._destroy()


def test_small_helpers() -> None:
    from torchgen.model import FunctionSchema

    @impl.custom_op("optest::f")
    def f(x: Tensor) -> Tensor: ...

    name = FunctionSchema.parse("f(Tensor x) -> Tensor").name
    assert impl.find_ophandle_or_throw("optest", name) is not None
    with pytest.raises(RuntimeError):
        impl.find_ophandle_or_throw("optest_missing", name)

    def mixed(a: Any, /, b: Any, *c: Any, d: Any) -> None: ...

    supported = [impl.supported_param(parameter) for parameter in inspect.signature(mixed).parameters.values()]
    assert supported == [False, True, False, True]
    with pytest.warns(DeprecationWarning, match=r"tarry\.custom_op"):
        impl.warn_deprecated()


@pytest.mark.parametrize("qualname", ["aten::sinnn", "optest::missing"])
def test_an_abstract_implementation_of_what_there_is_not(qualname: str) -> None:
    with pytest.raises(RuntimeError, match=f"there is no operator '{qualname}'"):
        _custom_ops.impl_abstract(qualname)(torch.empty_like)
    with pytest.raises(ValueError, match=f"there is no operator '{qualname}'"):
        _custom_ops.impl(qualname)(torch.empty_like)
