"""Kernels of listed operators are called: by the names that graphs have, and where PyTorch would take apart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tarry
from tarry.codegen.__main__ import main
from tests.codegen.yamls import write
from tests.support import fallbacks

USES_DEVICE = True

LISTED = """
backend: Lazy
cpp_namespace: mine
full_codegen: [add.Tensor, mul.Tensor, sub.Tensor, sigmoid, view_copy, expand_copy, slice_copy.Tensor, select_copy.int,
  permute_copy, unsqueeze_copy, squeeze_copy.dim, as_strided_copy, diagonal_copy, native_batch_norm, logdet, std,
  std.dim, inverse, selu, silu_backward, svd, var.correction, native_dropout, fill_.Scalar,
  convolution_overrideable, convolution_backward_overrideable, randperm]
supported: [empty.memory_format, lift, lift_fresh, detach, contiguous, _to_cpu, _copy_from, new_empty_strided, relu]
autograd: [hardtanh, hardtanh.out, elu.out, softplus, max_pool3d, aminmax.out]
"""

WRITTEN = """
import torch
from tarry.backends.generated import below_autograd

seen = []

class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, low, high):
        ctx.save_for_backward((x > low) & (x < high))
        with below_autograd():
            return x.clamp(low, high)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None

def relu(self):
    return self.clamp(min=0)

def hardtanh(self, min_val, max_val):
    seen.append((min_val, max_val))
    return Clamp.apply(self, min_val, max_val)

def hardtanh_out(self, min_val, max_val, *, out):
    seen.append((min_val, max_val))
    return out.copy_(self.clamp(min_val, max_val))

def elu_out(self, alpha, scale, input_scale, *, out):
    seen.append((alpha, scale, input_scale))
    return out.copy_(torch.where(self > 0, self, self.exp() - 1))

def softplus(self, beta, threshold):
    seen.append((beta, threshold))
    return (1 + self.exp()).log()

def max_pool3d(self, kernel_size, stride, padding, dilation, ceil_mode):
    seen.append((kernel_size, stride, padding, dilation, ceil_mode))
    return self * 2

def aminmax_out(self, *, dim, keepdim, min, max):
    seen.append((dim, keepdim))
    return min.copy_(self.amin()), max.copy_(self.amax())
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("listed")
    source, kernels = write(folder, LISTED), write(folder, WRITTEN, "listed_kernels.py")
    made = ["-o", str(folder / "listed"), "--impl-path", str(kernels), "--backend-name", "listed", "-q"]
    assert main(["-s", str(source), *made]) == 0
    sys.path.insert(0, str(folder))
    yield import_module("listed.backend")
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("listed", "listed_kernels")]:
        del sys.modules[name]


@pytest.fixture
def called(package: Any) -> Iterator[list[str]]:
    """The operators whose generated kernels were called."""
    names: list[str] = []

    class Watched(package.ListedBackend):  # type: ignore[misc,name-defined]
        def builtin(self, op: str, *args: Any, **kwargs: Any) -> Any:
            names.append(op.removeprefix("aten::"))
            return super().builtin(op, *args, **kwargs)

    tarry.set_backend(Watched(), compile="wait")
    yield names
    tarry.set_backend("eager")


X = torch.linspace(-1.5, 2, 16).reshape(4, 4)
REGULAR = X @ X.T + torch.eye(4)
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "view_copy": lambda x: (x + 1).view(16) + 1,
    "expand_copy": lambda x: (x + 1)[:1].expand(3, 4) + 1,
    "slice_copy.Tensor": lambda x: (x + 1)[1:3] + 1,
    "select_copy.int": lambda x: (x + 1)[1] + 1,
    "permute_copy": lambda x: (x + 1).t() + 1,
    "unsqueeze_copy": lambda x: ((x + 1)[1:3, 2] + 1)[:, None].expand(2, 5) + 1,
    "as_strided_copy": lambda x: (x + 1).unfold(0, 2, 1) + 1,
    "diagonal_copy": lambda x: (x + 1).diagonal() + 1,
    "logdet": lambda x: torch.logdet(x @ x.T + torch.eye(4).to(x.device)),
    "std.dim": lambda x: x.std(1),
    "inverse": lambda x: torch.inverse(x @ x.T + torch.eye(4).to(x.device)),
    "selu": torch.selu,
    "silu_backward": lambda x: torch.ops.aten.silu_backward(x, x),
    "svd": lambda x: torch.svd(x)[1],
}


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_of_a_listed_operator_is_called(name: str, called: list[str]) -> None:
    found = CALLS[name](X.to("tarry")).cpu()
    assert name in called
    torch.testing.assert_close(found, CALLS[name](X))


def test_operators_taken_apart_have_their_gradients(called: list[str]) -> None:
    def run(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (torch.selu(x).sum() + x.std() + F.silu(x).sum() + torch.logdet(x.T @ x + torch.eye(4).to(x.device))).backward()
        assert x.grad is not None
        return x.grad.cpu()

    torch.testing.assert_close(run(X.to("tarry")), run(X), rtol=1e-4, atol=1e-5)
    assert "selu" not in called


def test_what_fills_is_the_kernel_of_fill(called: list[str]) -> None:
    tarry.metrics.reset()
    made = [
        (X.to("tarry") + 1).zero_() * 2,
        torch.full((2, 3), True, device="tarry"),
        torch.ones(3, device="tarry") + 1,
    ]
    for found, expected in zip(made, [torch.zeros(4, 4), torch.full((2, 3), True), torch.full((3,), 2.0)], strict=True):
        torch.testing.assert_close(found.cpu(), expected)
    assert called.count("fill.Scalar") == 3
    assert not fallbacks()


def test_operators_that_draw_have_the_seed_of_their_node(called: list[str]) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(7)
        return [F.dropout(X.to("tarry"), 0.5).cpu() for _ in range(3)]

    made, before = run(), torch.get_rng_state()
    assert called.count("native_dropout") == 3
    assert not fallbacks()
    assert not torch.equal(made[0], made[1])
    torch.testing.assert_close(run(), made)
    assert torch.equal(torch.get_rng_state(), before)
    tarry.set_backend("eager")
    torch.testing.assert_close(run(), made)


@pytest.mark.parametrize("transposed", [True, False])
def test_convolutions_have_the_kernels_that_devices_register(transposed: bool, called: list[str]) -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        layer = (torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d)(2, 4, 3, padding=1, groups=2).to(device)
        x = torch.randn(2, 2, 5, 5).to(device).requires_grad_()
        made = layer(x)
        (made**2).sum().backward()
        return [t.detach().cpu() for t in [made, x.grad, layer.weight.grad, layer.bias.grad] if t is not None]

    torch.testing.assert_close(run("tarry"), run("cpu"), rtol=1e-4, atol=1e-4)
    assert called.count("convolution_overrideable") == called.count("convolution_backward_overrideable") == 1


def test_permutations_are_drawn_from_the_seed_of_their_node(called: list[str]) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(7)
        return [torch.randperm(100, device="tarry").cpu() for _ in range(2)]

    made = run()
    assert called == ["randperm"] * 2
    assert not torch.equal(*made)
    tarry.set_backend("eager")
    torch.testing.assert_close(run(), made)


def test_what_was_recorded_whole_is_taken_apart_by_other_backends(called: list[str]) -> None:
    assert "aten::selu" in tarry.explain(torch.selu(X.to("tarry")))
    tarry.set_backend("eager")
    assert "aten::selu" not in tarry.explain(torch.selu(X.to("tarry")))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_batch_normalisation(training: bool, tracked: bool, grad: bool, called: list[str]) -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm2d(3, track_running_stats=tracked).train(training)
        if tracked:
            norm.running_mean.add_(0.3)  # type: ignore[union-attr]
            norm.running_var.mul_(1.7)  # type: ignore[union-attr]
        norm = norm.to(device)
        x = torch.randn(2, 3, 4, 4).to(device).requires_grad_(grad)
        made = [norm(x)]
        if grad:
            (made[0] ** 2).sum().backward()
            made += [x.grad, norm.weight.grad]
        return [t.detach().cpu() for t in [*made, *norm.buffers()]]

    for found, expected in zip(run("tarry"), run("cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert "native_batch_norm" in called


def test_autograd_functions_are_given_all_arguments(called: list[str], package: Any) -> None:
    seen = sys.modules["listed_kernels"].seen
    seen.clear()
    x = X.to("tarry").requires_grad_()
    for call in (lambda x: F.hardtanh(x, -1, 1), F.hardtanh, lambda x: F.hardtanh(x, -1, 2.0), F.relu6):
        found, expected = (
            torch.autograd.grad(call(given).sum(), given)[0] for given in (x, X.clone().requires_grad_())
        )
        torch.testing.assert_close(found.cpu(), expected)
    assert seen == [(-1, 1), (-1.0, 1.0), (-1, 2.0), (0.0, 6.0)]
    F.softplus(x)
    F.max_pool3d(x[None, None], 2)
    assert seen[4:] == [(1, 20), ([2, 2, 2], [], [0, 0, 0], [1, 1, 1], False)]


def test_autograd_functions_of_out_variants(called: list[str], package: Any) -> None:
    seen = sys.modules["listed_kernels"].seen
    seen.clear()
    x, out, other = X.to("tarry"), torch.empty(4, 4).to("tarry"), torch.empty(()).to("tarry")
    assert torch._C._nn.hardtanh(x, out=out) is out
    torch.testing.assert_close(out.cpu(), F.hardtanh(X))
    assert torch._C._nn.elu(x, out=out) is out
    torch.testing.assert_close(out.cpu(), F.elu(X))
    least = torch.empty(()).to("tarry")
    torch.aminmax(x, out=(least, other))
    assert (least.item(), other.item()) == (-1.5, 2.0)
    assert seen == [(-1, 1), (1, 1, 1), (None, False)]


def test_nothing_is_owed_for_what_tarry_does_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = write(tmp_path, "", "nothing.py")
    arguments = ["-s", str(write(tmp_path, LISTED)), "-o", str(tmp_path / "out"), "--impl-path", str(kernels)]
    assert main(arguments) == 1
    asked = [line for line in capsys.readouterr().err.splitlines() if "lacks the kernel" in line]
    assert [line.rpartition(" ")[2] for line in asked] == ["relu"]
    assert not fallbacks()
