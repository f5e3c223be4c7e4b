"""What tensors can carry besides their values: a graph, tangents, a type of their own, a gradient in another layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import tarry
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


def test_a_graph_that_has_saved_nothing_is_not_lost() -> None:
    weight = torch.ones(3, device="tarry", requires_grad=True)
    step = tarry.compile(lambda x: (weight + x).sum(), verify=0)
    for _ in range(6):
        weight.grad = None
        (step(torch.ones(3, device="tarry")) + (weight * 0.5).sum()).backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [1.5] * 3
    assert step.replays == 0
    assert "backward() can still be called" in step.explain()


def test_transforms_and_tangents_see_the_function() -> None:
    step = tarry.compile(lambda x: (x * x).sum(), verify=0)
    x = torch.ones(3, device="tarry")
    for _ in range(4):
        step(x)
    assert step.replays
    assert torch.func.grad(step)(x).tolist() == [2.0] * 3
    assert torch.func.vmap(step)(torch.ones(2, 3, device="tarry")).tolist() == [3.0, 3.0]
    assert torch.func.jvp(step, (x,), (x,))[1].item() == 6.0
    assert torch.func.hessian(step)(x).diagonal().tolist() == [2.0] * 3
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(step(forward_ad.make_dual(x, x))).tangent.item() == 6.0
    replays = step.replays
    step(x)
    assert step.replays == replays + 1


class Increasing(Tensor):
    """Adds one to every product."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result + 1 if getattr(func, "__name__", "") == "mul" else result


def test_a_subclass_as_an_argument() -> None:
    step = tarry.compile(lambda x: torch.mul(x, 2.0), verify=0)
    x = torch.ones(3, device="tarry")
    for _ in range(4):
        step(x)
    assert step.replays
    assert step(x.as_subclass(Increasing)).tolist() == [3.0] * 3
    assert "argument 0 is a Increasing" in step.explain()


def test_a_subclass_as_a_result() -> None:
    step = tarry.compile(lambda x: (x * 2).as_subclass(Increasing), verify=0)
    for _ in range(4):
        assert type(step(torch.ones(3, device="tarry"))) is Increasing
    assert step.replays == 0


def test_an_argument_with_attributes() -> None:
    step = tarry.compile(lambda x: x * x.scale, verify=0)
    for scale in (2.0, 2.0, 2.0, 3.0):
        x: Any = torch.ones(3, device="tarry")
        x.scale = scale
        assert step(x).tolist() == [scale] * 3
    assert "attributes: scale" in step.explain()


def test_a_gradient_in_another_layout() -> None:
    weight = torch.ones(2, 2, device="tarry", requires_grad=True)
    weight.grad = torch.zeros(2, 2, device="tarry")

    @tarry.compile(verify=0)
    def step(x: Tensor) -> Tensor:
        (weight * x).sum().backward()
        return x * 1

    x = torch.zeros(2, 2, device="tarry")
    for _ in range(4):
        step(x)
    assert step.replays
    weight.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="tarry").t()
    step(x)
    assert weight.grad.tolist() == [[1.0, 3.0], [2.0, 4.0]]
