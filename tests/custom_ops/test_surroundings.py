"""Custom operators inside what PyTorch builds around them: torch.compile, export, vmap, autocast, checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tarry
from tests.custom_ops.operators import axpy_, cube
from tests.support import fallbacks

USES_DEVICE = True
DEVICES = pytest.mark.parametrize("device", ["cpu", "tarry"])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_as_one_graph_with_its_gradient(backend: str) -> None:
    op = cube()

    @torch.compile(fullgraph=True, backend=backend)
    def program(x: Tensor) -> Tensor:
        return op(x * 2).sum()

    x = torch.randn(3, requires_grad=True)
    program(x).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 24 * x.detach() ** 2)


def test_a_write_is_compiled() -> None:
    op = axpy_()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(x: Tensor, y: Tensor) -> Tensor:
        op(x, y, 2.0)
        return y + 1

    y = torch.ones(3)
    assert program(torch.ones(3), y).tolist() == [4.0] * 3
    assert y.tolist() == [3.0] * 3


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x + 1)

    op = cube()
    program = torch.export.export(Module(), (torch.randn(3),), strict=strict)
    assert "optest.cube.default" in [str(node.target) for node in program.graph.nodes]
    assert program.module()(torch.ones(3)).tolist() == [8.0] * 3


def test_compiled_with_a_size_that_depends_on_data() -> None:
    @tarry.custom_op("optest::positives")
    def positives(x: Tensor) -> Tensor: ...

    positives.impl("cpu")(lambda x: x[x > 0])

    @positives.impl_abstract()
    def _(x):
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: positives(x) * 2, fullgraph=True, backend="aot_eager")
        assert compiled(torch.tensor([1.0, -1.0, 3.0])).tolist() == [2.0, 6.0]


@DEVICES
@pytest.mark.parametrize("rule", [False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap(device: str, rule: bool) -> None:
    op = cube()
    calls = []
    if rule:

        @op.impl_vmap()
        def _(info, in_dims, x):
            calls.append(info.batch_size)
            return op(x), in_dims[0]

    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.vmap(op)(x.to(device)).cpu(), x**3)
    torch.testing.assert_close(torch.vmap(op, in_dims=1, out_dims=1)(x.to(device)).cpu(), x**3)
    assert calls == ([4, 3] if rule else [])


@DEVICES
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_torch_func(device: str) -> None:
    op = cube()
    x = torch.randn(4, 3)
    slope = torch.func.grad(lambda x: op(x).sum())
    torch.testing.assert_close(slope(x.to(device)).cpu(), 3 * x**2)
    torch.testing.assert_close(torch.vmap(slope)(x.to(device)).cpu(), 3 * x**2)
    second = torch.func.grad(lambda x: slope(x).sum())
    torch.testing.assert_close(second(x.to(device)).cpu(), 6 * x)


@DEVICES
def test_autocast(device: str) -> None:
    @tarry.custom_op("optest::double")
    def double(x: Tensor, xs: list[Tensor], k: int) -> Tensor: ...

    double.impl("cpu")(lambda x, xs, k: x * 2)
    double.impl_abstract()(lambda x, xs, k: torch.empty_like(x))
    x = torch.ones(2, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert double(x, [x], 1).dtype == torch.float32
    double.impl_autocast(["cpu", "tarry"], torch.bfloat16)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert double(x, [x], 1).dtype == torch.bfloat16
        assert double(x.double(), [x], 1).dtype == torch.float64
    assert double(x, [x], 1).dtype == torch.float32
    assert double(x, [x], 1).tolist() == [2.0, 2.0]


@DEVICES
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(device: str, reentrant: bool) -> None:
    op = cube()
    x = torch.tensor([1.0, 2.0]).to(device).requires_grad_()
    checkpoint(lambda x: op(op(x) * 2), x, use_reentrant=reentrant).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [8 * 9 * v**8 for v in (1.0, 2.0)]
    assert not fallbacks()


def test_saved_as_a_hook_sees_it() -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cube()(x)
    assert packed == [(2,)]


def test_what_pytorch_checks() -> None:
    for arguments in ((torch.randn(3),), (torch.randn(3, 2, requires_grad=True),)):
        cube()
        torch.library.opcheck(torch.ops.optest.cube.default, arguments)
    axpy_()
    torch.library.opcheck(torch.ops.optest.axpy_.default, (torch.randn(3), torch.randn(3), 2.0))
