"""Learning rates that change from call to call are followed where that is safe, and right where it is not."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import tarry
from tarry.replay.rates import RateWatch, Schedule, schedule
from tests.replay.training import batches, mlp, trainer
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

Optimizer = torch.optim.Optimizer
Rates = list[tuple[float, ...]]


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() == 1]}]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(grouped(model), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(grouped(model), lr=0.1, weight_decay=0.0)


def one_by_one(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(grouped(model), lr=0.1, nesterov=True, momentum=0.9, foreach=False)


def compare(make: Callable[[nn.Module], Optimizer], rates: Rates) -> Any:
    """Train eagerly and by replays with these rates of the two groups; all must be the same after each step."""
    eager, watched = trainer("cpu", mlp, make), trainer("tarry", mlp, make)
    step = tarry.compile(watched.step, verify=0)
    for (x, y), now in zip(batches(len(rates)), rates, strict=True):
        for each in (eager, watched):
            for group, rate in zip(each.optimizer.param_groups, now, strict=True):
                group["lr"] = rate
        torch.testing.assert_close(step(x.to("tarry"), y.to("tarry")).cpu(), eager.step(x, y), rtol=1e-3, atol=1e-4)
        assert [type(group["lr"]) for group in watched.optimizer.param_groups] == [type(rate) for rate in now]
    torch.testing.assert_close(watched.state(), eager.state(), rtol=1e-3, atol=1e-4)
    return step


@pytest.mark.parametrize("make", [sgd, adamw, one_by_one])
def test_a_schedule_is_replayed(make: Callable[[nn.Module], Optimizer]) -> None:
    step = compare(make, [(0.1 / (k + 1),) * 2 for k in range(14)])
    assert step.replays >= 9, step.explain()


def test_a_scheduler_of_torch() -> None:
    """Warm-up from zero, then a cosine."""
    eager, watched = trainer("cpu", mlp, adamw), trainer("tarry", mlp, adamw)
    step = tarry.compile(watched.step, verify=0)
    schedulers = []
    for each in (eager, watched):
        warm_up = torch.optim.lr_scheduler.LambdaLR(each.optimizer, lambda epoch: min(1.0, epoch / 4))
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(each.optimizer, 20)
        schedulers.append(torch.optim.lr_scheduler.SequentialLR(each.optimizer, [warm_up, cosine], [4]))
    for x, y in batches(20):
        torch.testing.assert_close(step(x.to("tarry"), y.to("tarry")).cpu(), eager.step(x, y), rtol=1e-3, atol=1e-4)
        for scheduler in schedulers:
            scheduler.step()
    assert step.replays >= 14, step.explain()
    torch.testing.assert_close(watched.state(), eager.state(), rtol=1e-3, atol=1e-4)


def test_rates_that_were_the_same_part() -> None:
    together: Rates = [(0.1 / (k + 1),) * 2 for k in range(8)]
    apart: Rates = [(0.01 * (k + 1), 0.2 / (k + 1)) for k in range(10)]
    step = compare(sgd, together + apart)
    assert step.replays >= 10, step.explain()


def test_a_rate_that_stood_still_moves() -> None:
    step = compare(sgd, [(0.1 / (k + 1), 0.05) for k in range(8)] + [(0.01, 0.05 / (k + 1)) for k in range(8)])
    assert step.replays >= 8, step.explain()


def test_one_rate_is_what_another_makes_of_its_weight_decay() -> None:
    """0.1 * lr is both the rate of the second group and part of what the first one computes."""
    compare(sgd, [(0.1 / (k + 1), 0.1 / (k + 1) * 0.1) for k in range(6)] + [(0.1, 0.02 * k) for k in range(6)])


def test_rates_too_small_to_show() -> None:
    """1 - lr * weight_decay is 1, like many other numbers, until the rate grows."""
    compare(adamw, [(1e-20 * (k + 1),) * 2 for k in range(8)] + [(0.1 / (k + 1),) * 2 for k in range(6)])


@pytest.mark.parametrize("odd", [0, 1, float("nan"), 0.0, -0.0])
def test_rates_of_other_kinds(odd: float) -> None:
    steady: Rates = [(0.1 / (k + 1),) * 2 for k in range(6)]
    rates = [*steady, (odd, odd), *steady]
    if odd == odd:
        compare(sgd, rates)
    else:
        step = compare(sgd, steady)
        assert step.replays > 0


RATE = st.sampled_from([0.1, 0.01, 0.05, 0.1 * 0.1, 0.0, 1e-20, 1])


@settings(max_examples=25, deadline=None)
@given(
    make=st.sampled_from([sgd, adamw]),
    rates=st.lists(st.one_of(st.tuples(RATE, RATE), RATE.map(lambda rate: (rate, rate))), min_size=8, max_size=14),
)
def test_any_rates_are_right(make: Callable[[nn.Module], Optimizer], rates: Rates) -> None:
    compare(make, rates)


# ---- functions that do something with rates themselves

Look = Callable[[float, Tensor], Any]
LOOKS: dict[str, tuple[Look, bool]] = {
    "a product": (lambda rate, x: x * rate, True),
    "a list": (lambda rate, x: torch._foreach_mul([x, x], [rate, 2 - rate])[1], True),
    "a power": (lambda rate, x: x * (2**rate) + rate**2 / 3, True),
    "a quotient": (lambda rate, x: x + (-rate) / 7 - 3 / (1 + rate), True),
    "a product with itself": (lambda rate, x: x * (rate * rate), True),
    "a comparison": (lambda rate, x: x * 2 if rate > 0.04 else x * 3, False),
    "truth": (lambda rate, x: x * 2 if rate else x * 3, False),
    "the larger": (lambda rate, x: x * max(rate, 0.04), False),
    "the larger of a product": (lambda rate, x: x * max(rate * 2, 0.3), False),
    "a number of numpy's": (lambda rate, x: x * float(max(rate * numpy.float64(2), 0.3)), False),
    "a product with a bool": (lambda rate, x: x * max(rate * True, 0.3), False),
    "a sign": (lambda rate, x: x * max((+rate).real, 0.3), False),
    "a copy": (lambda rate, x: x * max(copy.deepcopy(rate), 0.3), False),
    "a conversion": (lambda rate, x: x * (float(rate) + 1), False),
    "an integer": (lambda rate, x: x * int(rate * 100), False),
    "rounding": (lambda rate, x: x * round(rate, 1), False),
    "a tensor": (lambda rate, x: x * torch.tensor(rate, device=x.device), False),
    "a tensor on the host": (lambda rate, x: x * torch.full((3,), rate, dtype=torch.bfloat16).to(x.device), False),
    "text": (lambda rate, x: x * len(f"{rate:.1e}"), False),
}
CHANGING = (0.1, 0.0999999999, 0.0999999998, 0.08, 0.07, 0.05, 0.03, 0.02, 0.0, 0.5)


@pytest.mark.parametrize("name", LOOKS)
def test_what_may_be_done_with_a_rate(name: str) -> None:
    """By code that does not name rates."""
    look, is_followed = LOOKS[name]
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    read, key = optimizer.param_groups[0].__getitem__, "lr"
    step = tarry.compile(lambda x: look(read(key), optimizer and x), verify=0)
    for rate in CHANGING:
        optimizer.param_groups[0]["lr"] = rate
        found = step(torch.arange(3.0, device="tarry"))
        torch.testing.assert_close(found.cpu(), look(rate, torch.arange(3.0)), rtol=1e-6, atol=0)
        assert type(optimizer.param_groups[0]["lr"]) is float
    assert (step.replays > 0) == is_followed, step.explain()


@pytest.mark.parametrize(
    "look",
    [
        lambda rate, x: x * max(math.sqrt(rate), 0.4),
        lambda rate, x: x * 2 if math.isclose(rate, 0.05) else x * 3,
        lambda rate, x: F.interpolate(x.view(1, 1, 3), scale_factor=2 + rate),
    ],
)
def test_code_that_names_rates_is_recorded(look: Look) -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    step = tarry.compile(lambda x: look(optimizer.param_groups[0]["lr"], x), verify=0)
    for rate in CHANGING:
        optimizer.param_groups[0]["lr"] = rate
        found = step(torch.arange(3.0, device="tarry"))
        torch.testing.assert_close(found.cpu(), look(rate, torch.arange(3.0)), rtol=1e-6, atol=0)
    assert step.replays == 0


@pytest.mark.parametrize("kind", ["ExponentialLR", "StepLR", "CosineAnnealingLR"])
def test_a_scheduler_inside_is_recorded_and_keeps_floats(kind: str) -> None:
    class Training:
        def __init__(self, device: str) -> None:
            self.trained = trainer(device, mlp, sgd)
            make: Any = getattr(torch.optim.lr_scheduler, kind)
            self.scheduler = make(self.trained.optimizer, {"ExponentialLR": 0.9}.get(kind, 3))

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = self.trained.step(x, y)
            self.scheduler.step()
            return loss

    eager, watched = Training("cpu"), Training("tarry")
    step = tarry.compile(watched.step, verify=0)
    for x, y in batches(8):
        torch.testing.assert_close(step(x.to("tarry"), y.to("tarry")).cpu(), eager.step(x, y), rtol=1e-4, atol=1e-5)
    assert step.replays == 0
    assert [type(rate) for rate in watched.scheduler.get_last_lr()] == [float, float]


def test_a_rate_that_is_returned() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    step = tarry.compile(lambda x: (x * 2, optimizer.param_groups[0]["lr"]), verify=0)
    for rate in (0.1, 0.1, 0.1, 0.05, 0.02, 0.02):
        optimizer.param_groups[0]["lr"] = rate
        assert step(torch.ones(1, device="tarry"))[1] == rate


def test_a_watched_rate_is_copied_and_stored_as_a_float() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    with RateWatch(optimizer.param_groups) as watch:
        kept = optimizer.param_groups[0]["lr"] * 2
        state = optimizer.state_dict()
        assert type(copy.deepcopy(state)["param_groups"][0]["lr"]) is float
        assert type(pickle.loads(pickle.dumps(state))["param_groups"][0]["lr"]) is float
        assert f"{optimizer.param_groups[0]['lr']}" == "0.1"
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert watch.looked_at
    assert type(kept + 1) is float, "nothing is noted any more"


# ---- what is concluded


def conclude(compute: Callable[[float], list[float]], *rates: float) -> Schedule | None:
    group = {"lr": rates[0]}
    watches, numbers = [], []
    for rate in rates:
        group["lr"] = rate
        watches.append(RateWatch([group]))
        with watches[-1]:
            numbers.append([float.__float__(n) for n in compute(group["lr"])])
    return schedule(watches[0], numbers[0], watches[1], numbers[1])


def test_numbers_follow_from_rates() -> None:
    found = conclude(lambda rate: [rate, 3.0, 1 - rate * 0.5, -rate], 0.1, 0.2)
    assert found is not None
    assert found.positions == [0, 2, 3]
    found.groups[0]["lr"] = 0.4
    assert found.evaluate() == [0.4, 1 - 0.4 * 0.5, -0.4]


def test_nothing_is_concluded_where_values_coincide() -> None:
    assert conclude(lambda rate: [rate + 0.0, rate - 0.0], 0.1, 0.2) is None  # which of the two?
    assert conclude(lambda rate: [1.0, 1 - rate * 0.1], 1e-20, 2e-20) is None  # a constant, or not?
    assert conclude(lambda rate: [rate, 2.0 if rate > 0.15 else 3.0], 0.1, 0.2) is None
    assert conclude(lambda rate: [rate], 0.1, 0.1) is None


def test_a_quotient_by_nothing_cannot_be_told() -> None:
    found = conclude(lambda rate: [1 / rate], 0.1, 0.2)
    assert found is not None
    found.groups[0]["lr"] = 0.0
    assert found.evaluate() is None
