"""The XLA backend: training programs run whole on XLA and give what eager gives, also where JAX would do otherwise."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tarry
from tarry.errors import BackendError
from tarry.events import expect, record
from tarry.ir.operators import operator
from tests.backends.conftest import NO_JAX

USES_DEVICE = True


def _whole(seen: list[Any]) -> None:
    """Nothing of what happened left the compiled programs."""
    strays = [event for event in seen if event.kind in ("fallback", "interpreted", "error")]
    assert not strays, "\n".join(map(str, strays))


def _same(program: Callable[..., Any], *args: torch.Tensor, exact: bool = False) -> torch.Tensor:
    """Run a program on copies on the CPU and on the device, whole on XLA; results must agree, and so must strides."""
    expected = program(*(arg.clone() for arg in args))
    moved = [arg.to("tarry") for arg in args]
    with record() as seen:
        actual = program(*moved)
        host = actual.cpu()
    _whole(seen)
    kwargs: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(host, expected, equal_nan=True, **kwargs)
    strides = zip(actual.shape, actual.stride(), expected.stride(), strict=True)
    assert all(ours == theirs for size, ours, theirs in strides if size > 1)
    return host


# ---- being there, or not


def test_without_jax_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tarry.get_backend()
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(BackendError, match=r"pip install 'tarry\[xla\]'"):
        tarry.set_backend("xla")
    assert tarry.get_backend() is before


def test_a_device_that_jax_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax", reason=NO_JAX)
    from tarry.backends.xla.data import find_device

    def no_gpu(kind: str) -> list[Any]:
        raise RuntimeError(f"Unknown backend: {kind!r}")

    monkeypatch.setattr(jax, "devices", no_gpu)
    with pytest.raises(BackendError, match=r"no device for 'cuda:0'.*jax\[cuda"):
        find_device("cuda:0")


def test_the_tables_name_operators_that_exist(xla: None) -> None:
    from tarry.backends.xla.draws import DRAWN
    from tarry.backends.xla.table import LOWERINGS

    for name, lowering in LOWERINGS.items():
        described = operator(name)
        assert not described.is_mutable or name == "aten::_native_batch_norm_legit", name
        unknown = (lowering.constant | lowering.settled) - {argument.name for argument in described.arguments}
        assert not unknown, f"{name} has no arguments {sorted(unknown)}"
    for name in DRAWN:
        assert operator(name).random, name
    recipes = tarry.get_backend().decompositions()
    assert not recipes.keys() & (LOWERINGS.keys() | DRAWN.keys())
    assert not [name for name in recipes if operator(name).random]


# ---- training


class ConvNet(nn.Module):
    """Convolutions with and without groups and strides, batch norm, every pooling, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.SiLU(), nn.AvgPool2d(2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.0), nn.Linear(48, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.down(x + self.body(x)))


class Gpt(nn.Module):
    """Embeddings, layer norms, causal attention, GELU, tied output weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(17, 16), nn.Embedding(8, 16)
        self.dropout = nn.Dropout(dropout)
        self.first, self.second, self.last = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(dropout))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        batch, length = index.shape
        x = self.dropout(self.tokens(index) + self.places(torch.arange(length, device=index.device)))
        q, k, v = self.mix(self.first(x)).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, 16))
        x = self.last(x + self.mlp(self.second(x)))
        return (x @ self.tokens.weight.T).flatten(0, 1)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # a large eps, or noise decides


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "mlp": (_mlp, _sgd, lambda: (torch.randn(8, 12), torch.randint(5, (8,)))),
    "convnet": (ConvNet, _sgd, lambda: (torch.randn(4, 3, 18, 18), torch.randint(5, (4,)))),
    "gpt": (lambda: Gpt(0.0), _adamw, lambda: (torch.randint(17, (3, 8)), torch.randint(17, (24,)))),
}


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, steps: int
) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_runs_whole_and_as_eager(xla: None, name: str) -> None:
    make, optimize, batch = PROGRAMS[name]
    model = make()
    theirs = copy.deepcopy(model)
    ours = copy.deepcopy(model).to("tarry")
    x, y = batch()
    expected = _train(theirs, optimize(theirs), x, y, 4)
    with expect(compiles=2) as seen:  # the first step makes the optimizer's state, the others read it
        actual = _train(ours, optimize(ours), x.to("tarry"), y.to("tarry"), 4)
    _whole(seen)
    assert actual == pytest.approx(expected, rel=1e-4)
    for (key, value), other in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(other.cpu(), value, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def test_evaluation_after_training(xla: None) -> None:
    torch.manual_seed(0)
    model = ConvNet()
    ours = copy.deepcopy(model).to("tarry").eval()
    x = torch.randn(2, 3, 18, 18)
    with torch.no_grad(), record() as seen:
        torch.testing.assert_close(ours(x.to("tarry")).cpu(), model.eval()(x), rtol=1e-4, atol=1e-5)
    _whole(seen)


def test_dropout_draws_what_the_reference_path_draws(xla: None) -> None:
    torch.manual_seed(0)
    model = Gpt(0.3)
    x, y = torch.randint(17, (3, 8)).to("tarry"), torch.randint(17, (24,)).to("tarry")
    runs = []
    for backend in ("xla", "eager"):
        tarry.set_backend(backend)
        ours = copy.deepcopy(model).to("tarry")
        torch.manual_seed(5)
        with record() as seen:
            runs.append(_train(ours, _adamw(ours), x, y, 3))
        _whole(seen)
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)
    assert len(set(runs[0])) == 3


def test_mixed_precision(xla: None) -> None:
    torch.manual_seed(0)
    model = _mlp()
    ours = copy.deepcopy(model).to("tarry")
    x, y = torch.randn(8, 12), torch.randint(5, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.cross_entropy(model(x), y)
    expected.backward()
    with record() as seen:
        with torch.autocast("tarry", dtype=torch.bfloat16):
            loss = F.cross_entropy(ours(x.to("tarry")), y.to("tarry"))
        loss.backward()
        tarry.mark_step()
    _whole(seen)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    torch.testing.assert_close(ours[0].weight.grad.cpu(), model[0].weight.grad, rtol=0.05, atol=5e-3)


# ---- numbers


def test_a_new_learning_rate_is_no_new_program(xla: None) -> None:
    model = _mlp().to("tarry")
    optimizer = _adamw(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x, y = torch.randn(8, 12).to("tarry"), torch.randint(5, (8,)).to("tarry")
    _train(model, optimizer, x, y, 2)
    with expect(compiles=0, cache_hits=3):
        for _ in range(3):
            schedule.step()
            _train(model, optimizer, x, y, 1)


def test_an_exponent_is_a_constant_until_it_changes(xla: None) -> None:
    x = torch.tensor([2.0, 3.0], device="tarry")
    tarry.mark_step()
    for exponent, compiles in ((2, 1), (2, 0), (3, 1), (5, 0), (7, 0)):
        with expect(compiles=compiles):
            assert (x**exponent).tolist() == [2.0**exponent, 3.0**exponent]


def test_a_scale_of_one_is_left_out_until_it_changes(xla: None) -> None:
    x = torch.ones(2, device="tarry")
    tarry.mark_step()
    for alpha, compiles in ((1, 1), (1, 0), (3, 1), (4, 0)):
        with expect(compiles=compiles):
            assert torch.add(x, x, alpha=alpha).tolist() == [1.0 + alpha] * 2


def test_a_beta_of_zero_drops_what_it_scales(xla: None) -> None:
    nan, a = torch.full((2, 2), math.nan), torch.ones(2, 2)
    for beta in (0, 1, 0, 2, 0):  # as a constant and as an input
        _same(lambda x, y, beta=beta: torch.addmm(x, y, y, beta=beta, alpha=2), nan, a)


# ---- dtypes


def test_jax_keeps_its_own_settings(xla: None) -> None:
    import jax.numpy as jnp

    exact = 2**40 + 1
    assert (torch.tensor([exact], device="tarry") + 1).tolist() == [exact + 1]
    assert (torch.tensor([1.0], dtype=torch.float64, device="tarry") + 1e-12).item() == 1.0 + 1e-12
    assert jnp.ones(2).dtype == jnp.float32
    assert jnp.arange(2).dtype == jnp.int32


@pytest.mark.slow  # each case is quick, but all compile
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8], ids=str
)
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x * 0.1,
        lambda x: x + 3,
        lambda x: 1 - x,
        lambda x: x / 3,
        lambda x: x > 2.5,
        lambda x: x + torch.tensor(0.3, dtype=torch.float64).to(x.device),
        lambda x: torch.add(x.float(), x, alpha=2),
        lambda x: x.sum(),
        lambda x: x.to(torch.int8),
        lambda x: x.to(torch.bool),
        lambda x: torch.where(x > 2, x, 7.0),
        lambda x: torch.cat([x, x.double()]),
    ],
    ids=range(12),
)
def test_promotion_is_pytorchs(xla: None, program: Callable[..., Any], dtype: torch.dtype) -> None:
    _same(program, torch.tensor([0, 1, 2, 3, 5, 100]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_are_not_rounded_to_short_floats(xla: None, dtype: torch.dtype) -> None:
    _same(lambda x: x * 0.1, torch.linspace(1, 2, 50).to(dtype), exact=True)


# ---- what JAX would do differently

X = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.5, -2.5, 7.0, -7.0, 1e-3])
Y = torch.tensor([2.0, -3.0, 0.0, math.nan, 0.5, -0.0, 3.0, -3.0, 3.5, math.inf])
WHOLE = torch.tensor([[7, -7, 3], [-1, 0, 5]])

CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "floor division": (lambda x, y: torch.div(x, y, rounding_mode="floor"), (X, Y)),
    "truncating division": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), (X, Y)),
    "remainder": (lambda x, y: torch.remainder(x, y), (X, Y)),
    "fmod": (lambda x, y: torch.fmod(x, y), (X, Y)),
    "floor division of whole numbers": (lambda x: x // 2, (WHOLE,)),
    "remainder of whole numbers": (lambda x: x % -3, (WHOLE,)),
    "true division of whole numbers": (lambda x: x / 4, (WHOLE,)),
    "clamp keeps nan": (lambda x: x.clamp(-1, 1), (X,)),
    "clamp by tensors": (lambda x, y: x.clamp(min=y), (X, Y)),
    "maximum keeps nan": (torch.maximum, (X, Y)),
    "relu keeps nan": (torch.relu, (X,)),
    "sign": (torch.sign, (X,)),
    "round to even": (torch.round, (X,)),
    "power": (lambda x, y: x**y, (X.abs(), Y)),
    "sqrt by power": (lambda x: x**0.5, (X,)),
    "lerp at the ends": (lambda x, y: torch.lerp(x, y, 1.0), (torch.tensor([1e8, -3.0]), torch.tensor([1.0, 2.0]))),
    "argmax takes the first": (lambda x: x.argmax(1), (torch.tensor([[1.0, 3.0, 3.0], [math.nan, 9.0, math.nan]]),)),
    "max by dimension": (lambda x: torch.stack([part.float() for part in x.max(0)]), (WHOLE,)),
    "max of booleans": (lambda x: (x > 0).max(1).values, (WHOLE,)),
    "sort, largest first": (lambda x: x.sort(descending=True).indices, (torch.tensor([1.0, 3.0, 1.0, 3.0, 2.0]),)),
    "topk, smallest": (lambda x: x.topk(2, largest=False).values, (torch.tensor([3.0, -1.0, 2.0, 0.0]),)),
    "any of numbers": (lambda x: x.any(1), (WHOLE,)),
    "sum of booleans": (lambda x: (x > 0).sum(), (WHOLE,)),
    "sum over no dimension": (lambda x: x.sum(()), (WHOLE,)),
    "mean": (lambda x: x.float().mean((0, 1), keepdim=True), (WHOLE,)),
    "variance of one": (lambda x: x[:1].var(), (torch.ones(3),)),
    "cumulative sum": (lambda x: x.cumsum(1), (WHOLE,)),
    "softmax of a scalar": (lambda x: F.softmax(x.sum(), 0), (torch.ones(3),)),
    "softmax with -inf": (lambda x: F.log_softmax(x, 0), (torch.tensor([1.0, -math.inf, 2.0]),)),
    "loss, ignored targets": (
        lambda x, y: F.cross_entropy(x, y, ignore_index=1),
        (torch.randn(4, 3), torch.tensor([0, 1, 2, -100]).clamp(min=0)),
    ),
    "loss, all ignored": (lambda x, y: F.cross_entropy(x, y), (torch.randn(2, 3), torch.tensor([-100, -100]))),
    "loss, weights, none reduced": (
        lambda x, y: F.cross_entropy(x, y, weight=x.new_tensor([1.0, 0.0, 2.0]), reduction="none"),
        (torch.randn(4, 3), torch.tensor([0, 1, 2, 2])),
    ),
    "negative index": (lambda x, i: x[i], (torch.arange(5.0), torch.tensor([-1, 0, -5]))),
    "indices around a slice": (lambda x, i: x[i, :, i], (torch.arange(27.0).view(3, 3, 3), torch.tensor([0, 2]))),
    "gather fewer rows": (lambda x, i: x.gather(0, i), (torch.arange(12.0).view(4, 3), torch.tensor([[3, 1]]))),
    "scatter fewer rows": (
        lambda x, i, s: x.scatter(1, i, s),
        (torch.zeros(3, 4), torch.tensor([[3, 1]]), torch.ones(3, 3)),
    ),
    "put and accumulate": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        (torch.zeros(3), torch.tensor([1, 1, -1]), torch.tensor([1.0, 2.0, 3.0])),
    ),
    "put where a mask is": (lambda x: torch.where(x > 2, 0, x), (WHOLE,)),
    "empty cat": (lambda x: torch.cat([x.new_empty(0), x.float()[0]]), (WHOLE,)),
    "pad and crop": (lambda x: F.pad(x, (1, -1, 0, 2), value=9), (WHOLE,)),
    "nothing to reduce": (lambda x: x[:0].sum(0), (torch.ones(2, 3),)),
    "bytes as floats": (lambda x: x.view(torch.int32) + 1, (torch.ones(2, 3),)),
    "wider bytes": (lambda x: x.view(torch.int64) + 1, (torch.ones(2, 4),)),
    "narrower bytes": (lambda x: x.view(torch.int16) + 1, (torch.ones(2, 4),)),
    "complex parts": (lambda x: torch.view_as_real(torch.complex(x, -x) * 1j), (torch.ones(2, 3),)),
    "overlapping windows": (lambda x: x.unfold(0, 3, 1) * 2, (torch.arange(6.0),)),
    "a window of a transposed tensor": (lambda x: x.T.as_strided((2, 2), (1, 3)) + 1, (torch.arange(6.0).view(2, 3),)),
    "written diagonal": (lambda x: x.diagonal(1).fill_(3).sum() + x, (torch.zeros(3, 4),)),
    "written slice": (lambda x: x[::2].mul_(3).sum() + x, (torch.ones(5),)),
    "max pool, ceil": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), (torch.randn(1, 2, 7, 8),)),
    "max pool, dilated": (lambda x: F.max_pool2d(x, 2, 1, dilation=2), (torch.randn(1, 2, 7, 8),)),
    "average pool, ceil": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (torch.randn(1, 2, 8, 8),)),
    "average pool, padding not counted": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        (torch.randn(1, 2, 7, 7),),
    ),
    "uneven adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (torch.randn(1, 2, 7, 5),)),
    "transposed convolution": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, groups=2),
        (torch.randn(1, 4, 5, 5), torch.randn(4, 3, 3, 3)),
    ),
    "convolution in one dimension": (
        lambda x, w: F.conv1d(x, w, dilation=2),
        (torch.randn(2, 3, 9), torch.randn(4, 3, 3)),
    ),
    "arange by number": (lambda x: torch.arange(0.5, 3, 0.5, device=x.device) + x, (torch.ones(1),)),
}


@pytest.mark.slow  # each case is quick, but all compile
@pytest.mark.parametrize("name", CASES)
def test_semantics_are_eagers(xla: None, name: str) -> None:
    program, args = CASES[name]
    _same(program, *args)


GRADIENTS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "attention with a mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=(q[0, 0] @ k[0, 0].T).detach()),
        (torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)),
    ),
    "attention, scaled": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        (torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)),
    ),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (torch.randn(2, 2, 7, 8),)),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (torch.randn(2, 2, 8, 8),)),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (torch.randn(2, 2, 7, 5),)),
    "transposed convolution": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
        (torch.randn(1, 4, 5, 5), torch.randn(4, 3, 3, 3)),
    ),
    "dilated convolution with groups": (
        lambda x, w, b: F.conv2d(x, w, b, dilation=2, groups=2),
        (torch.randn(2, 4, 9, 9), torch.randn(6, 2, 3, 3), torch.randn(6)),
    ),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), (torch.randn(7),)),
    "embedding with padding": (
        lambda w: F.embedding(torch.tensor([[0, 2], [2, 1]]).to(w.device), w, padding_idx=1),
        (torch.randn(3, 4),),
    ),
    "an embedding of many rows": (
        lambda w: F.embedding(torch.tensor([5, 2999, 5]).to(w.device), w),
        (torch.randn(3000, 2),),
    ),
    "instance norm": (lambda x: F.instance_norm(x), (torch.randn(2, 3, 4, 4),)),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (torch.randn(2, 4, 5), torch.randn(4), torch.randn(4))),
}


@pytest.mark.slow  # each case is quick, but all compile
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_eagers(xla: None, name: str) -> None:
    program, args = GRADIENTS[name]

    def gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        value = program(*leaves)
        weights = torch.linspace(-1, 1, value.numel()).view(value.shape).to(value.device)
        return list(torch.autograd.grad((value * weights).sum(), leaves))

    expected = gradients(*args)
    with record() as seen:
        actual = [gradient.cpu() for gradient in gradients(*(arg.to("tarry") for arg in args))]
    _whole(seen)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# ---- random operators

DRAWS: dict[str, Callable[[str], torch.Tensor]] = {
    "rand": lambda device: torch.rand(5, device=device),
    "randn": lambda device: torch.randn(3, 40, device=device),
    "randn in half": lambda device: torch.randn(20, device=device, dtype=torch.bfloat16),
    "randint": lambda device: torch.randint(3, 100, (7,), device=device),
    "randperm": lambda device: torch.randperm(9, device=device),
    "rand_like": lambda device: torch.rand_like(torch.ones(3, 4, device=device).T),
    "uniform_": lambda device: torch.empty(5, device=device).uniform_(2, 3),
    "normal_": lambda device: torch.empty(20, device=device).normal_(1, 2),
    "bernoulli_": lambda device: torch.empty(30, device=device).bernoulli_(0.3),
    "exponential_": lambda device: torch.empty(30, device=device).exponential_(0.5),
    "dropout": lambda device: F.dropout(torch.arange(50.0, device=device), 0.4),
    "dropout of a transposed tensor": lambda device: F.dropout(torch.ones(6, 7, device=device).T + 1, 0.4),
    "dropout of all": lambda device: F.dropout(torch.ones(5, device=device), 1.0),
    "two in a row": lambda device: torch.rand(3, device=device) - torch.rand(3, device=device),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_gives_the_reference_paths_numbers(xla: None, name: str) -> None:
    results = []
    for backend in ("xla", "eager"):
        tarry.set_backend(backend)
        torch.manual_seed(11)
        with record() as seen:
            results.append((DRAWS[name]("tarry") + 1).cpu())
        _whole(seen)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_new_seed_is_no_new_program(xla: None) -> None:
    x = torch.ones(100, device="tarry")
    tarry.mark_step()
    with expect(compiles=1, fallbacks=0):
        drawn = {tuple(F.dropout(x, 0.5).tolist()) for _ in range(4)}
    assert len(drawn) == 4


# ---- errors of eager's that depend on data


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (lambda x, i: F.embedding(i, x), IndexError),
        (lambda x, i: x[i], IndexError),
        (lambda x, i: x.gather(0, i[:, None]), RuntimeError),
        (lambda x, i: F.cross_entropy(x, i.expand(4)), IndexError),
        (lambda x, i: x.long() // (i - i), RuntimeError),
    ],
    ids=["embedding", "index", "gather", "cross entropy", "division"],
)
def test_what_eager_refuses_is_refused_and_nothing_is_lost(xla: None, program: Any, error: type[Exception]) -> None:
    x, wrong = torch.ones(4, 2), torch.tensor([7])
    with pytest.raises(error) as eager:
        program(x, wrong)
    kept = torch.ones(2, device="tarry") + 1
    with pytest.raises(error) as ours:
        program(x.to("tarry"), wrong.to("tarry")).cpu()
    assert str(eager.value).splitlines()[0][:40] in str(ours.value)
    assert kept.tolist() == [2.0, 2.0]


# ---- on a GPU


@pytest.fixture
def xla_on_gpu() -> None:
    jax = pytest.importorskip("jax", reason=NO_JAX)
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX was installed without CUDA: pip install 'jax[cuda12]' or 'jax[cuda13]'")
    tarry.set_backend("xla", device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_on_a_gpu(xla_on_gpu: None, name: str) -> None:
    make, optimize, batch = PROGRAMS[name]
    model = make()
    ours = copy.deepcopy(model).to("tarry")
    x, y = batch()
    expected = _train(model, optimize(model), x, y, 4)
    with record() as seen:
        actual = _train(ours, optimize(ours), x.to("tarry"), y.to("tarry"), 4)
    _whole(seen)
    assert actual == pytest.approx(expected, rel=1e-3)


@pytest.mark.gpu
def test_streams_wait_for_each_other(xla_on_gpu: None) -> None:
    x = torch.zeros(1 << 24, device="tarry") + 1
    tarry.mark_step()
    for _ in range(20):
        with tarry.config.override(force_fallback={"aten::mul_.Scalar", "aten::mul_.Tensor"}):
            x.mul_(2)  # by PyTorch, on its stream
        x.sub_(1)  # by XLA, on its own
        tarry.mark_step()
    assert (x == 1).all().item()


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_gives_the_gpus_numbers(xla_on_gpu: None, name: str) -> None:
    results = []
    for backend in ("xla", "eager"):
        tarry.set_backend(backend, device="cuda")
        torch.manual_seed(11)
        results.append((DRAWS[name]("tarry") + 1).cpu())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
