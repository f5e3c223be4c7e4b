"""Attributes count for the objects that they are read from: `self.optimizer.step` is not the `step` of the trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tarry
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


class Trainer:
    """A loop in a class: its methods have the names of the optimizer's, and it counts what it does."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4).to("tarry")
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.taken = 0
        self.losses: list[float] = []
        self.scale = 1.0
        self._compiled = tarry.compile(self._train, verify=0)

    def step(self, x: torch.Tensor) -> float:
        self.taken += 1
        self.losses.append(self._compiled(x).item())
        return self.losses[-1]

    def zero_grad(self) -> None:
        self.taken = 0

    def _train(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum() * self.scale
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _x() -> torch.Tensor:
    return torch.ones(2, 4, device="tarry")


@pytest.mark.parametrize("scheduler", [False, True])
def test_a_trainer_that_counts_is_replayed(scheduler: bool) -> None:
    trainer = Trainer()
    if scheduler:  # it replaces optimizer.step by a function of torch's
        torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    for _ in range(6):
        trainer.step(_x())
    assert trainer._compiled.replays, trainer._compiled.explain()
    trainer.scale = 0.0
    assert trainer.losses[-1] > 0
    assert trainer.step(_x()) == 0  # what is read from `self` still counts


def test_a_replaced_step_of_an_optimizer_is_seen() -> None:
    trainer, factor = Trainer(), [1.0]
    original = trainer.optimizer.step

    def step() -> None:
        for parameter in trainer.model.parameters():
            assert parameter.grad is not None
            parameter.grad *= factor[0]
        original()

    trainer.optimizer.step = step  # type: ignore[method-assign,assignment]
    for _ in range(6):
        trainer.step(_x())
    factor[0] = 0.0
    last = [trainer.step(_x()) for _ in range(3)]
    assert last[1] == last[2]


def test_what_was_added_to_an_optimizer_is_seen() -> None:
    optimizer: Any = torch.optim.SGD([torch.ones(1, device="tarry", requires_grad=True)], lr=0.1)
    optimizer.scale = None
    step = tarry.compile(lambda x: x * (optimizer.scale or 1.0), verify=0)
    x = torch.ones(2, device="tarry")
    assert [step(x).tolist() for _ in range(5)] == [[1.0, 1.0]] * 5
    optimizer.scale = 4.0
    assert step(x).tolist() == [4.0, 4.0]


class Scaled(torch.optim.SGD):
    factor = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= self.factor
        super().step(closure)


def test_an_optimizer_of_the_users_is_looked_into() -> None:
    trainer = Trainer(Scaled)
    for _ in range(6):
        trainer.step(_x())
    trainer.optimizer.factor = 0.0  # type: ignore[attr-defined]
    last = [trainer.step(_x()) for _ in range(3)]
    assert last[1] == last[2]


class Choice:
    """Two objects whose attribute is read by one instruction."""

    def __init__(self) -> None:
        self.first, self.second = Scale(2.0), Scale(3.0)
        self.use_first = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.first if self.use_first else torch.finfo).max if self.use_first else x * _value(self).max


class Scale:
    def __init__(self, value: float) -> None:
        self.max = value


def _value(choice: Choice) -> Scale:
    return choice.first if choice.use_first else choice.second


def test_an_attribute_of_one_of_two_objects() -> None:
    choice = Choice()
    step = tarry.compile(choice.__call__, verify=0)
    x = torch.ones(2, device="tarry")
    assert [step(x).tolist() for _ in range(5)] == [[3.0, 3.0]] * 5
    choice.second.max = 4.0
    assert step(x).tolist() == [4.0, 4.0]
    choice.use_first = True
    assert step(x).tolist() == [2.0, 2.0]
    choice.first.max = 7.0
    assert step(x).tolist() == [7.0, 7.0]


def test_what_keeps_a_call_from_being_replayed_is_told() -> None:
    class Annealed(Trainer):
        def _train(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).sum().detach() * (1.0 if self.taken < 100 else 2.0)

    trainer = Annealed()
    for _ in range(30):
        trainer.step(_x())
    told = trainer._compiled.explain()
    assert "self.taken was" in told
    assert "are recorded without looking" in told  # looking costs time, and found nothing
