"""Random numbers: the same seed gives the same numbers, in every mode and on every run, and nothing else repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import DEVICE, dev, expect, step, tarry_only

USES_DEVICE = True

DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(50, device=DEVICE),
    "randn": lambda: torch.randn(5, 10, device=DEVICE),
    "randint": lambda: torch.randint(0, 1000, (50,), device=DEVICE),
    "randperm": lambda: torch.randperm(50, device=DEVICE),
    "rand_like": lambda: torch.rand_like(torch.ones(50, device=DEVICE)),
    "randn_like": lambda: torch.randn_like(torch.ones(50, device=DEVICE)),
    "bernoulli": lambda: torch.bernoulli(torch.full((100,), 0.5, device=DEVICE)),
    "multinomial": lambda: torch.multinomial(torch.ones(50, device=DEVICE), 40),
    "normal": lambda: torch.normal(torch.zeros(50, device=DEVICE), 1.0),
    "uniform_": lambda: torch.empty(50, device=DEVICE).uniform_(-1, 1),
    "normal_": lambda: torch.empty(50, device=DEVICE).normal_(2, 3),
    "exponential_": lambda: torch.empty(50, device=DEVICE).exponential_(),
    "random_": lambda: torch.empty(50, device=DEVICE).random_(),
    "dropout": lambda: F.dropout(torch.ones(100, device=DEVICE), 0.5),
    "dropout2d": lambda: F.dropout2d(torch.ones(40, 3, 1, 1, device=DEVICE), 0.5),
    "poisson": lambda: torch.poisson(torch.full((50,), 20.0, device=DEVICE)),
    "rrelu": lambda: F.rrelu(-torch.ones(50, device=DEVICE), training=True),
}


@pytest.mark.parametrize("name", list(DRAWS))
def test_same_seed_same_numbers(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(7)
    first, second = draw(), draw()
    torch.manual_seed(7)
    again = draw()
    assert torch.equal(first, again)
    assert not torch.equal(first, second), "two draws differ"
    torch.manual_seed(8)
    assert not torch.equal(first, draw())


@pytest.mark.parametrize("name", list(DRAWS))
def test_cutting_does_not_change_the_numbers(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(7)
    whole = [draw() for _ in range(3)]
    torch.manual_seed(7)
    cut = []
    for _ in range(3):
        cut.append(draw())
        step()
        cut[-1].sum().item()
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


@pytest.mark.parametrize("name", list(DRAWS))
def test_on_the_device_with_the_right_shape(name: str) -> None:
    drawn = DRAWS[name]()
    assert drawn.device.type == DEVICE
    assert bool(drawn.cpu().isfinite().all())


def test_distributions() -> None:
    torch.manual_seed(0)
    normal = torch.randn(20000, device=DEVICE).cpu()
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 1) < 0.05
    uniform = torch.rand(20000, device=DEVICE).cpu()
    assert abs(uniform.mean() - 0.5) < 0.02
    assert uniform.min() >= 0
    assert uniform.max() < 1
    kept = F.dropout(torch.ones(20000, device=DEVICE), 0.25).cpu()
    assert abs((kept == 0).float().mean() - 0.25) < 0.02
    assert abs(kept.mean() - 1) < 0.05
    assert torch.equal(torch.randperm(100, device=DEVICE).cpu().sort().values, torch.arange(100))


def test_generator() -> None:
    a = torch.Generator(device=DEVICE).manual_seed(3)
    b = torch.Generator(device=DEVICE).manual_seed(3)
    x = torch.randn(10, generator=a, device=DEVICE)
    torch.randn(10, device=DEVICE)  # the default generator is another one
    assert torch.equal(x, torch.randn(10, generator=b, device=DEVICE))
    assert not torch.equal(x, torch.randn(10, generator=a, device=DEVICE))
    assert a.initial_seed() == 3
    state = a.get_state()
    y = torch.rand(5, generator=a, device=DEVICE)
    a.set_state(state)
    assert torch.equal(y, torch.rand(5, generator=a, device=DEVICE))


def test_a_host_generator_is_refused() -> None:
    if DEVICE == "cpu":
        pytest.skip("a CPU generator is the right one there")
    with pytest.raises(RuntimeError, match=r"[Gg]enerator"):
        torch.randn(3, generator=torch.Generator(), device=DEVICE)


@tarry_only
def test_state_of_the_default_generator() -> None:
    torch.tarry.manual_seed(11)
    state = torch.tarry.get_rng_state()
    x = torch.randn(4, device=DEVICE)
    torch.tarry.set_rng_state(state)
    assert torch.equal(x, torch.randn(4, device=DEVICE))
    torch.tarry.manual_seed_all(11)
    assert torch.equal(x, torch.randn(4, device=DEVICE))
    assert torch.tarry.initial_seed() == 11


@tarry_only
def test_fork_rng() -> None:
    torch.manual_seed(5)
    torch.randn(2, device=DEVICE)
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        inside = torch.randn(4, device=DEVICE)
    after = torch.randn(4, device=DEVICE)
    assert torch.equal(inside, after), "the block's draws leave no trace"


def test_dropout_masks_agree_in_forward_and_backward() -> None:
    torch.manual_seed(1)
    x = torch.ones(200, device=DEVICE, requires_grad=True)
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_redraws_the_same_mask(reentrant: bool) -> None:
    torch.manual_seed(2)
    x = torch.ones(200, device=DEVICE, requires_grad=True)
    y = checkpoint(lambda t: F.dropout(t * 1, 0.5), x, use_reentrant=reentrant)
    torch.randn(3, device=DEVICE)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad)


def test_every_step_draws_anew_without_a_compile() -> None:
    x = dev(torch.ones(100))

    def draw() -> list[float]:
        out = F.dropout(x, 0.5)
        step()
        return out.tolist()

    first = draw()
    with expect(compiles=0):
        second, third = draw(), draw()
    assert first != second != third != first


def test_inference_dropout_is_the_identity() -> None:
    x = dev(torch.arange(5.0))
    assert torch.equal(F.dropout(x, 0.5, training=False), x)
    assert torch.nn.Dropout(0.5).eval()(x).tolist() == x.tolist()
    assert F.dropout(x, 1.0).tolist() == [0.0] * 5


def test_resuming_from_a_saved_state() -> None:
    if DEVICE == "cpu":
        pytest.skip("torch.get_rng_state is the CPU's own")
    torch.manual_seed(3)
    [torch.randn(2, device=DEVICE) for _ in range(5)]
    saved = torch.tarry.get_rng_state().clone()
    first = F.dropout(torch.ones(50, device=DEVICE)).tolist()
    torch.manual_seed(99)
    torch.tarry.set_rng_state(saved)
    assert F.dropout(torch.ones(50, device=DEVICE)).tolist() == first
