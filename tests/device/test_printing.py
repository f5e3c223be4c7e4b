"""Printing shows what the CPU would show, and reads the tensor once."""

from __future__ import annotations

import pytest
import torch

from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


def suffixed(expected: str) -> str:
    """The text of a CPU tensor as it reads for one on the device."""
    assert expected.endswith(")")
    return expected[:-1] + ", device='tarry:0')"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1.0, -2.5], [float("nan"), float("inf")]]),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3 - 4j]),
        torch.arange(5000.0).reshape(50, 100),
    ],
    ids=["scalar", "integers", "floats", "booleans", "complex", "summarised"],
)
def test_contents_are_those_of_the_cpu(tensor: torch.Tensor) -> None:
    assert repr(tensor.to("tarry")) == suffixed(repr(tensor))


def test_dtype_and_gradient_follow_the_device() -> None:
    x = torch.ones(2, dtype=torch.float16, device="tarry")
    assert repr(x) == "tensor([1., 1.], device='tarry:0', dtype=torch.float16)"
    y = torch.ones(2, device="tarry", requires_grad=True)
    assert repr(y) == "tensor([1., 1.], device='tarry:0', requires_grad=True)"
    assert repr(y * 2) == "tensor([2., 2.], device='tarry:0', grad_fn=<MulBackward0>)"
    assert repr(torch.nn.Parameter(y.detach())) == (
        "Parameter containing:\ntensor([1., 1.], device='tarry:0', requires_grad=True)"
    )


def test_empty_tensors() -> None:
    assert repr(torch.empty(0, device="tarry")) == "tensor([], device='tarry:0')"
    assert repr(torch.empty(0, 3, device="tarry")) == "tensor([], device='tarry:0', size=(0, 3))"


def test_one_sync() -> None:
    from tarry.events import expect

    x = torch.arange(10_000.0, device="tarry").reshape(100, 100) + 1
    with expect(syncs=1, fallbacks=0):
        repr(x)


def test_printing_does_not_change_the_gradient() -> None:
    x = torch.ones(3, device="tarry", requires_grad=True)
    y = x * 3
    str(y)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0, 3.0]


def test_format_of_a_single_number() -> None:
    assert f"{torch.tensor(2.0, device='tarry'):.3f}" == "2.000"


def test_other_tensors_print_as_before() -> None:
    assert repr(torch.ones(2)) == "tensor([1., 1.])"
    assert repr(torch.ones(2, device="meta")) == "tensor(..., device='meta', size=(2,))"


def test_fake_tensors_are_not_read() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2, 3, device="tarry")
    assert repr(fake) == "FakeTensor(..., device='tarry:0', size=(2, 3))"


def test_inside_a_transform() -> None:
    texts: list[str] = []

    def square(x: torch.Tensor) -> torch.Tensor:
        texts.append(repr(x))
        return x * x

    torch.func.vmap(square)(torch.ones(3, device="tarry"))
    assert "BatchedTensor" in texts[0]
    assert "tensor([1., 1., 1.], device='tarry:0')" in texts[0]
