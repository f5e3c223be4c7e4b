"""optimizer.step() ends the step; optimizers of other devices are left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


@pytest.fixture
def cuts() -> Iterator[list[str]]:
    """A second hook beside the real one, which notes its calls."""
    from tarry.device import optimizer

    seen: list[str] = []
    handle = optimizer.install(lambda: seen.append("cut"))
    yield seen
    handle.remove()


def parameter(device: str) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.ones(3, device=device)
    return p


def test_once_per_step(cuts: list[str]) -> None:
    optimizer = torch.optim.AdamW([parameter("tarry")])
    optimizer.step()
    assert cuts == ["cut"]
    optimizer.step()
    assert cuts == ["cut", "cut"]


def test_not_for_another_device(cuts: list[str]) -> None:
    torch.optim.SGD([parameter("cpu")], lr=0.1).step()
    assert cuts == []


def test_a_later_group_counts_and_an_empty_one_is_passed_over(cuts: list[str]) -> None:
    groups = [{"params": []}, {"params": [parameter("cpu")]}, {"params": [parameter("tarry")]}]
    torch.optim.SGD(groups, lr=0.1).step()
    assert cuts == ["cut"]


def test_removed(cuts: list[str]) -> None:
    from tarry.device import optimizer

    other: list[str] = []
    handle = optimizer.install(lambda: other.append("cut"))
    handle.remove()
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
