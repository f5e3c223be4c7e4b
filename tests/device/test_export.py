"""torch.export, make_fx and torch.jit.trace of modules and functions on tarry."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export.passes import move_to_device_pass
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.norm(self.linear(x)))[None]
        return F.scaled_dot_product_attention(y, y, y)[0] * x.shape[0]


def models() -> tuple[Model, Model]:
    model = Model()
    return model, copy.deepcopy(model).to("tarry")


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_size_that_varies(strict: bool) -> None:
    model, ours = models()
    sizes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    exported = torch.export.export(ours, (torch.randn(3, 4).to("tarry"),), dynamic_shapes=sizes, strict=strict)
    x = torch.randn(7, 4)
    module = exported.module()
    torch.testing.assert_close(module(x.to("tarry")).detach().cpu(), model(x).detach())
    state = module.state_dict()
    for name, theirs in model.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), theirs)  # the statistics of BatchNorm are updated


def test_exported_programs_are_saved_decomposed_and_moved() -> None:
    model, ours = models()
    model.eval(), ours.eval()
    x = torch.randn(3, 4)
    exported = torch.export.export(ours, (x.to("tarry"),))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for program in (torch.export.load(file), exported.run_decompositions()):
        torch.testing.assert_close(program.module()(x.to("tarry")).cpu(), model(x))
    torch.testing.assert_close(move_to_device_pass(exported, "cpu").module()(x), model(x))
    from_cpu = move_to_device_pass(torch.export.export(model, (x,)), "tarry")
    torch.testing.assert_close(from_cpu.module()(x.to("tarry")).cpu(), model(x))


def changes_in_place(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.softmax(x @ y, -1) + torch.arange(3, device=x.device)
    z[0] = 1
    z.add_(x.sum())
    return z, z.view(-1)[:3]


def gradient(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    return torch.autograd.grad((x.sin() @ y).sum(), (x, y))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("function", [changes_in_place, gradient])
def test_make_fx(function: Any, mode: str) -> None:
    def inputs(seed: int) -> list[torch.Tensor]:
        return [torch.randn(3, 3, generator=torch.Generator().manual_seed(seed + i)) for i in range(2)]

    traced = make_fx(function, tracing_mode=mode)(*(tensor.to("tarry") for tensor in inputs(0)))
    others = inputs(2)
    got = traced(*(tensor.to("tarry") for tensor in others))
    for ours, theirs in zip(got, function(*others), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach())


def test_symbolic_trace_and_jit_trace() -> None:
    model, ours = models()
    model.eval(), ours.eval()
    x = torch.randn(3, 4)
    for traced in (torch.fx.symbolic_trace(ours), torch.jit.trace(ours, x.to("tarry"))):
        torch.testing.assert_close(traced(x.to("tarry")).detach().cpu(), model(x).detach())
