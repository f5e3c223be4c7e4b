"""Steps of SGD, Adam and AdamW that are taken natively while calls are direct: bit for bit those of eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import tarry
from tarry.device import fast_step
from tarry.native import C
from tests.device.test_fast_step import OTHERS, PLAIN
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

TAKE_DIRECTLY = fast_step.take_directly
Make = Callable[[list[Any]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    """All calls are direct that can be."""
    C.force_direct_calls(True)
    yield
    C.force_direct_calls(False)


class Steps:
    """A model that is trained on each device; counts which steps were native."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        on_cpu = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.Linear(5, 1)).to(dtype)
        self.models = {"cpu": on_cpu, "tarry": copy.deepcopy(on_cpu).to("tarry")}
        self.optimizers = {device: make([*model.parameters()]) for device, model in self.models.items()}
        self.native: list[bool] = []
        self._before = self._versions()

    def _versions(self) -> dict[str, list[int]]:
        return {device: [p._version for p in model.parameters()] for device, model in self.models.items()}

    def _writes(self) -> list[list[int]]:
        """How often each parameter has been written, on each device."""
        now = self._versions()
        return [[a - b for a, b in zip(now[device], self._before[device], strict=True)] for device in now]

    def take(self, number: int, without: int | None = None) -> None:
        x = torch.linspace(-1, 2, 21).reshape(3, 7)
        for device, model in self.models.items():
            optimizer = self.optimizers[device]
            optimizer.zero_grad()
            (model(x.to(next(model.parameters()))).square().sum() * (number + 1)).backward()
            if without is not None:
                [*model.parameters()][without].grad = None
            with mock.patch.object(fast_step, "take_directly", self._take_directly):
                optimizer.step()

    def _take_directly(self, optimizer: torch.optim.Optimizer) -> bool:
        self.native.append(TAKE_DIRECTLY(optimizer))
        return self.native[-1]

    def compare(self) -> None:
        assert self._writes()[0] == self._writes()[1]
        for ours, eager in zip(*(self.models[device].parameters() for device in ("tarry", "cpu")), strict=True):
            assert torch.equal(ours.cpu(), eager)
            states = [self.optimizers["tarry"].state.get(ours, {}), self.optimizers["cpu"].state.get(eager, {})]
            assert states[0].keys() == states[1].keys()
            for key, value in states[1].items():
                if isinstance(value, Tensor):
                    assert torch.equal(states[0][key].cpu(), value)
                    assert states[0][key].dtype == value.dtype


def made(name: str) -> Make:
    class_, options = (PLAIN | OTHERS)[name]
    return lambda params: class_(params, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in PLAIN if name != "SGD nesterov"])
def test_the_same_bits_as_eager(name: str, dtype: torch.dtype) -> None:
    steps = Steps(made(name), dtype)
    for number in range(4):
        steps.take(number)
    assert steps.native == [name == "SGD", True, True, True]  # the others make their state first
    steps.compare()


@pytest.mark.parametrize("name", [*(name for name in OTHERS if name != "capturable"), "SGD nesterov"])
def test_other_steps_are_not_taken(name: str) -> None:
    steps = Steps(made(name))
    for number in range(2):
        steps.take(number)
    assert True not in steps.native


def test_groups_have_options_of_their_own() -> None:
    def make(params: list[Any]) -> torch.optim.Optimizer:
        groups = [{"params": params[:2], "weight_decay": 0.0, "betas": (0.5, 0.9)}, {"params": params[2:], "lr": 0.1}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.2)

    steps = Steps(make)
    for number in range(3):
        steps.take(number)
    assert steps.native == [False, True, True]
    steps.compare()


def test_parameters_without_gradients_stay_and_counts_may_differ() -> None:
    steps = Steps(made("Adam"))
    steps.take(0)
    for without in (1, None, 3, 0):
        steps.take(2, without)
    assert steps.native == [False, True, True, True, True]
    steps.compare()


def test_a_step_ends_a_stretch_and_is_known_as_the_recorded_one() -> None:
    """Recorded and direct steps are the same stretch: calls stay direct."""
    model = nn.Linear(4, 2).to("tarry")
    optimizer = torch.optim.Adam(model.parameters())
    stretches: list[tuple[int, int]] = []

    def take() -> None:
        before = C.counters(0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        after = C.counters(0)
        stretches.append((after["record"] - before["record"], after["direct"] - before["direct"]))

    take()
    take()
    C.hold_direct_calls(True)
    try:
        take()
    finally:
        C.hold_direct_calls(False)
    assert sum(stretches[1]) == sum(stretches[2])


def test_shared_memory_that_is_written_is_not_seen_by_others() -> None:
    model = nn.Linear(3, 2).to("tarry")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept = model.weight.detach().clone()
    lazy = torch._lazy_clone(model.weight.detach())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tarry.sync()
    assert torch.equal(lazy.cpu(), kept.cpu())
    assert torch.equal(model.weight.detach().cpu(), kept.cpu() - 1)


def test_what_is_saved_for_backward_is_found_changed() -> None:
    weight = nn.Parameter(torch.ones(3, device="tarry"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loss = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
