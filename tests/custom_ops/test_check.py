"""`op.check` finds every way in which an operator can differ from its declaration."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import tarry
from tarry.custom_ops import CustomOp
from tarry.errors import CustomOpCheckError
from tests.custom_ops.operators import axpy_, cube, diagonal

USES_DEVICE = True


def operator(
    kernel: Any = torch.sin, abstract: Any = torch.empty_like, slope: Any = torch.cos, **options: Any
) -> CustomOp:
    @tarry.custom_op("optest::f", exist_ok=True, **options)
    def f(x: Tensor) -> Tensor: ...

    f.impl("cpu")(kernel)
    if abstract is not None:
        f.impl_abstract()(abstract)
    if slope is not None:
        f.impl_save_for_backward()(lambda inputs, output: inputs.x)
        f.impl_backward()(lambda ctx, saved, grad: {"x": grad * slope(saved)})
    return f


def faults(op: CustomOp, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CustomOpCheckError) as raised:
        op.check(*args, **kwargs)
    return str(raised.value)


def test_good_operators_pass() -> None:
    x = torch.randn(3, 4)
    cube().check(x)
    cube().check(x.t())
    cube().check(torch.randn(300))  # many elements: products of the Jacobian
    axpy_().check(x, torch.ones(3, 4), a=2.0)
    diagonal().check(torch.randn(3, 3))
    operator().check(x)


def test_an_undeclared_mutation() -> None:
    text = faults(operator(lambda x: x.add_(1).clone(), slope=None), torch.ones(3))
    assert "mutation: argument x was written to" in text
    assert "mutates_args" in text


def test_an_undeclared_mutation_that_leaves_the_values_alone() -> None:
    text = faults(operator(lambda x: x.clamp_(-10, 10).clone(), slope=None), torch.ones(3))
    assert "mutation: argument x was written to" in text


def test_a_result_that_is_kept() -> None:
    kept = torch.ones(3)
    text = faults(operator(lambda x: kept, slope=None), torch.ones(3))
    assert "aliasing: the result of two calls is in the same memory" in text


def test_a_backward_function_that_writes_to_its_gradient() -> None:
    @tarry.custom_op("optest::g")
    def g(x: Tensor) -> Tensor: ...

    g.impl("cpu")(lambda x: x * 2)
    g.impl_abstract()(torch.empty_like)
    g.impl_save_for_backward()(lambda inputs, output: None)
    g.impl_backward()(lambda ctx, saved, grad: {"x": grad.mul_(2)})
    assert "writes to the gradient that it is given" in faults(g, torch.randn(3))


def test_an_expanded_argument() -> None:
    operator().check(torch.randn(1, 3).expand(4, 3))


def test_an_undeclared_mutation_of_a_list() -> None:
    @tarry.custom_op("optest::g")
    def g(xs: list[Tensor]) -> Tensor: ...

    g.impl("cpu")(lambda xs: xs[1].zero_().clone())
    g.impl_abstract()(lambda xs: torch.empty_like(xs[1]))
    assert "argument xs[1] was written to" in faults(g, [torch.ones(2), torch.ones(2)])


def test_an_undeclared_alias() -> None:
    for kernel in (lambda x: x, lambda x: x.view(3), lambda x: x[:]):
        text = faults(operator(kernel, slope=None), torch.ones(3))
        assert "aliasing: the result shares memory with argument x" in text


def test_results_that_share_memory() -> None:
    @tarry.custom_op("optest::g")
    def g(x: Tensor) -> tuple[Tensor, Tensor]: ...

    g.impl("cpu")(lambda x: (y := x + 1, y.view(-1)))
    g.impl_abstract()(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    assert "result 1 shares memory with result 0" in faults(g, torch.ones(3))


def test_a_view_that_is_none() -> None:
    @tarry.custom_op("optest::g", "(Tensor(a) x) -> Tensor(a)")
    def g(x): ...

    g.impl("cpu")(lambda x: x.clone())
    g.impl_abstract()(lambda x: x.view_as(x))
    assert "declared as an alias of an argument, and is none" in faults(g, torch.ones(3))


@pytest.mark.parametrize(
    ("abstract", "says"),
    [
        (lambda x: x.new_empty(x.shape[0]), r"promised with shape (3) and made with (3, 2)"),
        (lambda x: torch.empty_like(x, dtype=torch.float64), "promised as torch.float64 and made as torch.float32"),
        (lambda x: torch.empty_like(x).t().contiguous().t(), "promised with strides (1, 3) and made with (2, 1)"),
        (lambda x: torch.empty_like(x, device="meta"), "promised on device meta and made on cpu"),
        (None, "there is none. Register one with impl_abstract"),
    ],
    ids=["shape", "dtype", "strides", "device", "missing"],
)
def test_a_wrong_abstract_implementation(abstract: Any, says: str) -> None:
    text = faults(operator(abstract=abstract, slope=None), torch.ones(3, 2))
    assert "abstract implementation: " in text
    assert says in text


def test_a_result_on_another_device() -> None:
    text = faults(operator(lambda x: torch.empty(3, device="meta"), slope=None), torch.ones(3))
    assert "promised on device cpu and made on meta" in text


def test_an_abstract_implementation_that_forgets_the_device() -> None:
    text = faults(operator(abstract=lambda x: torch.empty(x.shape), slope=None), torch.ones(3))
    assert "device: the result is on cpu whatever the device of the arguments" in text


def test_a_wrong_gradient() -> None:
    text = faults(operator(slope=torch.sin), torch.randn(3))
    assert "gradient: the backward function at " in text
    assert "test_check.py" in text
    assert "disagrees with finite differences" in text
    faults(operator(slope=torch.sin), torch.randn(200))


def test_a_gradient_of_a_kernel_that_takes_single_precision_only() -> None:
    def kernel(x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return x.sin()

    operator(kernel).check(torch.randn(3))
    assert "disagrees with finite differences" in faults(operator(kernel, slope=torch.sin), torch.randn(3))


def test_only_the_gradients_that_are_asked_for() -> None:
    @tarry.custom_op("optest::g")
    def g(x: Tensor, y: Tensor) -> Tensor: ...

    g.impl("cpu")(lambda x, y: x * y)
    g.impl_abstract()(lambda x, y: torch.empty_like(x))
    g.impl_save_for_backward()(lambda inputs, output: inputs.y)
    g.impl_backward()(lambda ctx, saved, grad: {"x": grad * saved, "y": None})
    g.check(torch.randn(3, requires_grad=True), torch.randn(3))
    assert "gradient" in faults(g, torch.randn(3), torch.randn(3))


def test_non_determinism() -> None:
    counter = itertools.count()
    text = faults(operator(lambda x: x + next(counter), slope=None), torch.ones(3))
    assert "determinism: two calls with the same arguments give different values" in text
    assert "nondeterministic_seeded" in faults(operator(lambda x: x + torch.rand(3), slope=None), torch.ones(3))


def test_random_operators_say_so() -> None:
    seeded = torch.Tag.nondeterministic_seeded
    operator(lambda x: x + torch.rand(x.shape), slope=None, tags=seeded).check(torch.ones(3))
    counter = itertools.count()
    text = faults(operator(lambda x: x + next(counter), slope=None, tags=seeded), torch.ones(3))
    assert "something else than PyTorch's generator" in text


def test_recorded_differs_from_called() -> None:
    op = operator(slope=None)
    op.impl("tarry")(lambda x: x.cos())
    assert "recorded: the result has other values when recorded" in faults(op, torch.ones(3))


def test_a_size_that_depends_on_data() -> None:
    def abstract(x: Tensor) -> Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    operator(lambda x: x[x > 0], abstract, slope=None).check(torch.tensor([1.0, -1.0]))


def test_all_faults_in_one_error() -> None:
    text = faults(operator(lambda x: x.add_(1), lambda x: x.new_empty(7), slope=None), torch.ones(3))
    for kind in ("mutation", "aliasing", "abstract implementation"):
        assert f". {kind}: " in text
    assert text.splitlines()[0].endswith("faults:")


def test_calls_that_cannot_be_checked() -> None:
    op = operator()
    with pytest.raises(TypeError, match="takes the operator's arguments"):
        op.check(torch.ones(3), k=1)
    with pytest.raises(TypeError, match="missing x"):
        op.check()
    with pytest.raises(TypeError, match="takes tensors of a real device"):
        op.check(torch.ones(3, device="tarry"))
    with pytest.raises(CustomOpCheckError, match="the call itself raises"):
        operator(lambda x: 1 / 0).check(torch.ones(3))
