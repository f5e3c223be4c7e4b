"""The lowering to FX graphs, run by FX itself: what a compiler is given computes what was recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tarry
from tarry.events import expect

USES_DEVICE = True


def _as_it_is(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
    return module.forward


@pytest.fixture(autouse=True)
def _backend() -> Iterator[None]:
    tarry.set_backend(_as_it_is)
    yield
    tarry.set_backend("eager")


def _lists(t: Tensor) -> list[Tensor]:
    return [t, t + 1]


WITH_NUMBER: dict[str, Callable[[Tensor, float], object]] = {
    "add": lambda t, v: t + v,
    "add alpha": lambda t, v: torch.add(t, t, alpha=v),
    "sub": lambda t, v: t - v,
    "sub alpha": lambda t, v: torch.sub(t, t, alpha=v),
    "rsub": lambda t, v: v - t,
    "mul": lambda t, v: t * v,
    "div": lambda t, v: t / v,
    "number / tensor": lambda t, v: v / t,
    "addcmul": lambda t, v: torch.addcmul(t, t, t, value=v),
    "addcdiv": lambda t, v: torch.addcdiv(t, t, t + 3, value=v),
    "lerp": lambda t, v: torch.lerp(t, t + 1, v),
    "pow": lambda t, v: t.abs().pow(v),
    "number ** tensor": lambda t, v: torch.pow(abs(v), t),
    "fill": lambda t, v: t.clone().fill_(v),
    "full_like": lambda t, v: torch.full_like(t, v),
    "full": lambda t, v: torch.full((2, 3), v, dtype=t.dtype, device=t.device),
    "clamp": lambda t, v: t.clamp(-v, v),
    "clamp_min": lambda t, v: t.clamp_min(v),
    "clamp_max": lambda t, v: t.clamp_max(v),
    "masked_fill": lambda t, v: t.masked_fill(t > 0, v),
    "comparison": lambda t, v: t < v,
    "where": lambda t, v: torch.where(t > 0, t, v),
    "foreach add": lambda t, v: torch._foreach_add(_lists(t), v),
    "foreach add alpha": lambda t, v: torch._foreach_add(_lists(t), _lists(t), alpha=v),
    "foreach mul": lambda t, v: torch._foreach_mul(_lists(t), v),
    "foreach mul, each its own": lambda t, v: torch._foreach_mul(_lists(t), [v, v + 1]),
    "foreach addcdiv": lambda t, v: torch._foreach_addcdiv(_lists(t), _lists(t), [t + 3, t + 4], [v, v + 1]),
    "foreach lerp": lambda t, v: torch._foreach_lerp(_lists(t), _lists(t + 1), v),
    "foreach pow": lambda t, v: torch._foreach_pow(_lists(t.abs()), v),
    "foreach maximum": lambda t, v: torch._foreach_maximum(_lists(t), v),
    "foreach norm": lambda t, v: torch._foreach_norm(_lists(t), 2),
    "foreach sqrt": lambda t, v: torch._foreach_sqrt(_lists(t.abs())),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", WITH_NUMBER)
def test_numbers_compute_as_in_eager_whatever_they_become(name: str, dtype: torch.dtype) -> None:
    """The first value may be a constant of the program, a later one an input: both give eager's result and type."""
    for value in (0.7, 1.9, 3, 2):
        for shape in ((3, 2), ()):
            torch.manual_seed(1)
            given = (torch.randn(shape) * 3).to(dtype)
            try:
                expected = WITH_NUMBER[name](given, value)
            except RuntimeError:
                continue  # eager refuses the combination (a fraction into integers)
            actual = WITH_NUMBER[name](given.to("tarry"), value)
            for a, e in zip(_flat(actual), _flat(expected), strict=True):
                assert a.dtype == e.dtype
                torch.testing.assert_close(a.cpu(), e)


def _flat(result: object) -> list[Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]  # type: ignore[list-item]


def test_a_number_that_changes_becomes_an_input() -> None:
    x = torch.ones(3, device="tarry")
    tarry.mark_step()
    with expect(compiles=1):
        for value in (0.5, 0.25, 1.0):
            assert (x * value).tolist() == [value] * 3
    with expect(compiles=2):  # whole numbers are constants until they change
        for value in (2, 3, 4, 5):
            assert (x * value + 1).tolist() == [value + 1.0] * 3


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True, fused=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def _scheduled(device: str, optimizer: Callable[[Any], torch.optim.Optimizer], steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2).to(device)
    updates = optimizer(net.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(updates, steps)
    x = torch.ones(4, 3).to(device)
    for _ in range(steps):
        updates.zero_grad()
        net(x).square().mean().backward()
        updates.step()
        schedule.step()
    return [p.detach().cpu() for p in net.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_with_a_schedule_is_compiled_a_few_times(name: str) -> None:
    """The first step, which makes the state; the others; and with a learning rate that was taken for a constant."""
    with expect(compiles=3 if "fused" in name else 2, fallbacks=0):
        actual = _scheduled("tarry", OPTIMIZERS[name], 12)
    for a, e in zip(actual, _scheduled("cpu", OPTIMIZERS[name], 12), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("backend", [_as_it_is, "torchscript"])
def test_fused_optimizers_and_numbers_beyond_the_dtype(backend: object) -> None:
    tarry.set_backend(backend)  # type: ignore[arg-type]
    weights = []
    for device in ("cpu", "tarry"):
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 3, device=device)).square().sum().backward()
            optimizer.step()
        weights.append([p.detach().cpu() for p in net.parameters()])
    for a, e in zip(*weights, strict=True):
        torch.testing.assert_close(a, e)
    assert (torch.ones(2).to("tarry") * 1e300).tolist() == [float("inf")] * 2


def test_random_operators_draw_what_the_reference_path_draws() -> None:
    def draw() -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.ones(4, 5, device="tarry")
        made = [
            F.dropout(x, 0.4),
            torch.randn(3, device="tarry"),
            torch.rand_like(x),
            torch.bernoulli(x * 0.3),
            torch.randperm(6, device="tarry"),
            torch.randint(9, (4,), device="tarry"),
            x.clone().normal_(),
            x.clone().exponential_(),
            torch.multinomial(x, 2),
            F.rrelu(-x, training=True),
        ]
        return [t.cpu() for t in made]

    here = draw()
    assert not torch.equal(here[2], torch.rand_like(here[2]))
    tarry.set_backend("eager")
    for a, b in zip(here, draw(), strict=True):
        assert torch.equal(a, b)


def test_a_new_seed_is_no_new_program() -> None:
    x = torch.ones(100, device="tarry")
    tarry.mark_step()
    with expect(compiles=1):
        sums = {F.dropout(x, 0.5).sum().item() for _ in range(5)}
    assert len(sums) > 1


def test_operators_without_a_pure_form_run_on_copies() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    base = x.to("tarry")
    tarry.mark_step()
    out = torch.zeros((), dtype=torch.float64, device="tarry")
    torch.logsumexp(base, 0, out=out)  # accumulates in the output's type, so it is kept as it is
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.cpu(), torch.logsumexp(x.double(), 0))
    assert base.tolist() == x.tolist()


@pytest.mark.parametrize(("size", "stride"), list(itertools.product([(2, 3)], [(1, 2), (3, 1), (0, 1), (2, 2)])))
def test_windows_of_values_that_are_not_contiguous(size: tuple[int, int], stride: tuple[int, int]) -> None:
    source = torch.arange(12.0).view(3, 4)

    def look(t: Tensor) -> Tensor:
        return (t.t() * 2).as_strided(size, stride, 1) + 1

    assert torch.equal(look(source.to("tarry")).cpu(), look(source))


def test_every_node_has_the_type_that_was_recorded() -> None:
    seen: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        seen.append(module)
        return module.forward

    tarry.set_backend(keep)
    x = torch.randn(3, 4).to("tarry")
    y = F.layer_norm(x @ x.t(), (3,)).split([1, 2])[1].sum().item()
    assert isinstance(y, float)
    (module,) = seen
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    assert calls
    assert all("val" in node.meta for node in calls)
    assert all(str(node.target).startswith("aten.") or "getitem" in str(node.target) for node in calls)


def test_one_number_for_a_list_of_a_length_is_given_as_the_list() -> None:
    """Inductor counts the numbers that it is given."""
    given: list[list[int]] = []

    def compiler(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        pooling = torch.ops.aten.avg_pool2d_backward.default
        given.extend(node.args[4] for node in module.graph.nodes if node.target is pooling)  # type: ignore[misc]
        return module.forward

    tarry.set_backend(compiler)
    x = torch.ones(1, 1, 4, 4, device="tarry", requires_grad=True)
    F.avg_pool2d(x, (2, 2), padding=(0,)).sum().backward()
    assert x.grad is not None
    assert x.grad.sum().item() == 4.0
    assert given == [[0, 0]]
