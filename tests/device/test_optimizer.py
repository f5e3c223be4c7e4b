"""optimizer.step() ends the step; optimizers of other devices are left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tarry
from tarry.device import optimizer
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


class Noted:
    """Steps of which only the cuts are noted."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def cut(self) -> None:
        self.seen.append("cut")

    def finish(self) -> None: ...

    def is_observed(self) -> bool:
        return False


@pytest.fixture
def cuts() -> Iterator[list[str]]:
    """A second hook beside the real one, which notes its calls."""
    seen: list[str] = []
    hooks = optimizer.StepHooks(Noted(seen))
    yield seen
    hooks.remove()


def parameter(device: str) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.ones(3, device=device)
    return p


def test_once_per_step(cuts: list[str]) -> None:
    adam = torch.optim.AdamW([parameter("tarry")])
    adam.step()
    assert cuts == ["cut"]
    adam.step()
    assert cuts == ["cut", "cut"]


def test_not_for_another_device(cuts: list[str]) -> None:
    torch.optim.SGD([parameter("cpu")], lr=0.1).step()
    assert cuts == []


def test_a_later_group_counts_and_an_empty_one_is_passed_over(cuts: list[str]) -> None:
    groups = [{"params": []}, {"params": [parameter("cpu")]}, {"params": [parameter("tarry")]}]
    torch.optim.SGD(groups, lr=0.1).step()
    assert cuts == ["cut"]


def test_removed(cuts: list[str]) -> None:
    other: list[str] = []
    optimizer.StepHooks(Noted(other)).remove()
    torch.optim.SGD([parameter("tarry")], lr=0.1).step()
    assert other == []
    assert cuts == ["cut"]


def test_the_step_is_cut_without_being_asked() -> None:
    from tarry.events import expect

    p = parameter("tarry")
    optimizer = torch.optim.SGD([p], lr=0.5)
    with expect(syncs=1, fallbacks=0):
        optimizer.step()
    assert p.tolist() == [0.5, 0.5, 0.5]


# ---- steps that fail


KINDS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adamw, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


@pytest.mark.parametrize("bad_steps", [{0}, {3}, {0, 1, 4}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["eager", "torchscript"])
def test_a_step_that_fails_is_not_counted(backend: str, kind: str, bad_steps: set[int]) -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3).to(device)
        chosen = KINDS[kind](net.parameters())
        for step in range(7):
            x = torch.randn(5, 4).to(device)
            target = torch.full((5,), 9 if step in bad_steps else step % 3).to(device)
            try:
                chosen.zero_grad()
                torch.nn.functional.cross_entropy(net(x), target).backward()
                chosen.step()
                tarry.wait()
            except IndexError:
                assert step in bad_steps
            else:
                assert step not in bad_steps
        state = [value for entry in chosen.state.values() for _, value in sorted(entry.items())]
        return [value.cpu() for value in [*net.parameters(), *state] if isinstance(value, torch.Tensor)]

    tarry.set_backend(backend)
    try:
        torch.testing.assert_close(train("tarry"), train("cpu"))
    finally:
        tarry.set_backend("eager")
