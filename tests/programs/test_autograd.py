"""Autograd on the device: what eager does, from double backward to custom functions and torch.func."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.support import DEVICE, assert_same, both, dev, expect, step, tarry_only

USES_DEVICE = True


def _leaf(value: Any) -> Tensor:
    return dev(torch.as_tensor(value)).requires_grad_()


def test_accumulation_and_zeroing() -> None:
    x = _leaf([1.0, 2.0])
    for _ in range(3):
        (x * x).sum().backward()
        step()
    assert_same(x.grad, torch.tensor([6.0, 12.0]))
    x.grad.zero_()
    (x * 3).sum().backward()
    assert_same(x.grad, torch.tensor([3.0, 3.0]))
    x.grad = None
    (x * 2).sum().backward()
    assert_same(x.grad, torch.tensor([2.0, 2.0]))


def test_retain_graph() -> None:
    x = _leaf([2.0])
    y = x**3
    y.sum().backward(retain_graph=True)
    step()
    y.sum().backward()
    assert x.grad.item() == 24.0
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_double_and_triple_backward() -> None:
    def program(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = (x**4).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        (gg,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        (ggg,) = torch.autograd.grad(gg.sum(), x)
        return [g.detach(), gg.detach(), ggg]

    both(program, torch.tensor([1.0, -2.0, 0.5]))


def test_double_backward_through_layers() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)

    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = F.layer_norm(F.gelu(F.conv2d(x, w)), (4, 4)).softmax(-1).square().sum()
        gx, gw = torch.autograd.grad(y, (x, w), create_graph=True)
        (gx.square().sum() + gw.square().sum()).backward()
        return [x.grad, w.grad]

    both(program, x, w)


def test_grad_modes() -> None:
    x = _leaf([1.0])
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.enable_grad():
        assert (x * 2).requires_grad
    with torch.inference_mode():
        y = x * 2
        assert y.is_inference()
        assert y.item() == 2.0
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        (y * x).sum().backward()

    @torch.no_grad()
    def update() -> None:
        x.sub_(0.5)

    update()
    assert x.item() == 0.5


def test_leaf_and_version_errors_are_pytorchs() -> None:
    x = _leaf([1.0, 2.0])
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)
    y = x.exp()
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        dev(torch.ones(2)).sum().backward()
    with pytest.raises(RuntimeError, match="scalar outputs"):
        (x * 2).backward()


def test_tensor_hooks_and_retain_grad() -> None:
    def program(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = x * 3
        y.retain_grad()
        y.register_hook(lambda g: g * 2)
        seen: list[Tensor] = []
        x.register_hook(lambda g: seen.append(g))
        x.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(10))
        (y * y).sum().backward()
        return [x.grad, y.grad, *seen]

    both(program, torch.tensor([1.0, 2.0]))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2 * ctx.scale, None


class Twins(torch.autograd.Function):
    """Two outputs, one not differentiable, and an input changed in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        buffer.add_(1)
        ctx.mark_dirty(buffer)
        best = x.argmax()
        ctx.mark_non_differentiable(best)
        return x * 2, best, buffer

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:
        return grad * 2, None


def test_custom_functions() -> None:
    def program(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        buffer = torch.zeros_like(x)
        doubled, best, changed = Twins.apply(x, buffer)
        y = Cube.apply(doubled, 0.5).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.sum().backward()
        return [x.grad, best, changed, buffer]

    both(program, torch.tensor([1.0, 3.0, -2.0]))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(4, 4) for _ in range(3)]

    def program(x: Tensor, weights: list[Tensor], use: bool) -> list[Tensor]:
        x = x.detach().requires_grad_()
        weights = [w.detach().requires_grad_() for w in weights]
        y = x
        for w in weights:
            block = lambda t, w=w: torch.tanh(t @ w)
            y = checkpoint(block, y, use_reentrant=reentrant) if use else block(y)
        y.square().sum().backward()
        return [x.grad, *(w.grad for w in weights)]

    x = torch.randn(2, 4)
    plain = program(x, weights, use=False)
    here = both(program, x, weights, use=True)
    assert_same(here, plain)


def test_checkpoint_sequential() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)))
    x = torch.randn(2, 4, requires_grad=True)
    checkpoint_sequential(net, 2, x, use_reentrant=False).sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net = net.to(DEVICE)
    net.zero_grad()
    checkpoint_sequential(net, 2, dev(x).requires_grad_(), use_reentrant=False).sum().backward()
    assert_same([p.grad for p in net.parameters()], expected)


@tarry_only
def test_checkpointing_is_not_undone_by_common_subexpressions() -> None:
    import tarry

    w = _leaf(torch.eye(4))
    x = dev(torch.ones(2, 4))
    y = checkpoint(lambda t: torch.tanh(t @ w).sin(), x, use_reentrant=False)
    y.sum().backward()
    text = tarry.explain(w.grad, stage="optimized")
    assert text.count("tanh") - text.count("tanh_backward") >= 1
    step()
    # The recomputed part is there a second time when both results are wanted.
    w.grad = None
    y = checkpoint(lambda t: torch.tanh(t @ w).sin(), x, use_reentrant=False)
    y.sum().backward()
    text = tarry.explain(y, w.grad, stage="optimized")
    assert text.count("mm") >= 3, f"forward, recomputation and backward each have a product:\n{text}"


def test_saved_tensor_hooks_to_the_host() -> None:
    def program(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            y = (x.exp() * x).sum()
        y.backward()
        grad = x.grad
        assert grad is not None
        return grad

    both(program, torch.tensor([1.0, 2.0]))


def test_gradients_of_pieces() -> None:
    def program(x: Tensor) -> Tensor | None:
        x = x.detach().requires_grad_()
        a, b, c = x.chunk(3, dim=1)
        rows = x.unbind(0)
        ((a * b).sum() + (c * 2).sum() + sum(i * (r * r).sum() for i, r in enumerate(rows))).backward()
        return x.grad

    both(program, torch.randn(4, 6))


def test_in_place_under_autograd() -> None:
    def program(x: Tensor) -> Tensor | None:
        x = x.detach().requires_grad_()
        y = x * 2
        y[0].mul_(3)
        y.t()[1].add_(x[:, 0])
        y.relu_()
        F.dropout(y, 0.0, inplace=True)
        (y * y).sum().backward()
        return x.grad

    both(program, torch.randn(3, 3))


@pytest.mark.filterwarnings("ignore")  # the warning that shows the forward trace is what anomaly mode is for
def test_anomaly_mode_names_the_forward_line() -> None:
    x = _leaf([0.0])
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan"):
        (x.sqrt() * 0).sum().backward()


@tarry_only
def test_forward_and_backward_are_one_graph() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(DEVICE)
    x = dev(torch.randn(3, 4))
    step()
    with expect(syncs=1, compiles=1, fallbacks=0):
        loss = net(x).square().mean()
        loss.backward()
        step()
    with expect(compiles=0, executes=0):
        assert all(p.grad is not None and bool(p.grad.cpu().isfinite().all()) for p in net.parameters())


def test_func_grad_vjp_jvp() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.sin() * x**2).sum()

    def program(x: Tensor, v: Tensor) -> list[Any]:
        _out, pull = torch.func.vjp(lambda t: t.sin() * t, x)
        return [
            torch.func.grad(f)(x),
            torch.func.grad_and_value(f)(x),
            pull(v),
            torch.func.jvp(f, (x,), (v,)),
            torch.func.hessian(f)(x),
            torch.func.jacrev(lambda t: t * t)(x),
            torch.func.jacfwd(lambda t: t * t.sum())(x),
        ]

    both(program, torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]))


def test_func_vmap() -> None:
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        return [
            torch.vmap(lambda t: t @ w)(x),
            torch.vmap(torch.dot)(x, x),
            torch.vmap(lambda t: t.softmax(0).cumsum(0), in_dims=1)(x),
            torch.vmap(torch.func.grad(lambda t: (t @ w).square().sum()))(x),
            torch.vmap(lambda a, b: torch.where(a > 0, a, b), in_dims=(0, None))(x, w[:, 0]),
        ]

    both(program, torch.randn(4, 3), torch.randn(3, 2))


def test_functional_call_and_per_sample_gradients() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    x, y = torch.randn(5, 3), torch.randn(5, 2)

    def program(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return (torch.func.functional_call(net, weights, (x,)) - y).square().mean()

        per_sample: dict[str, Tensor] = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)
        return per_sample

    both(program, {k: v.detach() for k, v in net.named_parameters()}, x, y)


def test_forward_mode() -> None:
    import torch.autograd.forward_ad as fwd

    def program(x: Tensor, v: Tensor) -> Any:
        with fwd.dual_level():
            dual = fwd.make_dual(x, v)
            out = (dual.exp() * dual).sum()
            return tuple(fwd.unpack_dual(out))

    both(program, torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0]))


def test_gradcheck() -> None:
    x = dev(torch.randn(3, 2, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: (t.sigmoid() * t.t().sum()).cumsum(0), (x,))


@pytest.mark.process
def test_backward_of_another_device_before_the_first_use() -> None:
    """The engine starts its threads at the first backward of the process; ours must have one all the same."""
    script = (
        "import torch\n"
        "torch.ones(2, requires_grad=True).sum().backward()\n"
        "import tarry\n"
        "x = torch.ones(2, device='tarry', requires_grad=True)\n"
        "(x * 3).sum().backward()\n"
        "print(x.grad.tolist())\n"
    )
    result = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=100)
    assert result.stdout.strip() == "[3.0, 3.0]", result.stderr
