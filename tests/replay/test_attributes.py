"""What a replay depends on and is not in an object's own dictionary: classes, slots, properties, containers, hooks."""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import tarry
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


class Config:
    scale = 2.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Computed:
    def __init__(self) -> None:
        self._half = 1.0

    @property
    def scale(self) -> float:
        return 2 * self._half


def _set_class_attribute(config: Config) -> None:
    Config.scale = 5.0


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Config, _set_class_attribute),
        (Config, lambda config: setattr(config, "scale", 5.0)),
        (Slotted, lambda config: setattr(config, "scale", 5.0)),
        (Computed, lambda config: setattr(config, "_half", 2.5)),
    ],
    ids=["class", "instance over class", "slots", "property"],
)
def test_attributes_wherever_they_live(
    make: Callable[[], Any], change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "scale", 2.0)
    config = make()
    step = tarry.compile(lambda x: (x * config.scale).sum())
    x = torch.ones(4, device="tarry")
    assert [step(x).item() for _ in range(6)] == [8.0] * 6
    assert step.replays
    change(config)
    assert [step(x).item() for _ in range(4)] == [20.0] * 4


def test_a_class_that_is_named() -> None:
    step = tarry.compile(lambda x: (x * Config.scale).sum())
    x = torch.ones(4, device="tarry")
    assert [step(x).item() for _ in range(6)] == [8.0] * 6
    try:
        Config.scale = 3.0
        assert step(x).item() == 12.0
    finally:
        Config.scale = 2.0


@pytest.mark.parametrize(
    ("container", "change"),
    [
        ({"a"}, lambda c: (c.clear(), c.add("b"))),
        (deque([1.0]), lambda c: (c.clear(), c.append(2.0))),
        (numpy.ones(1), lambda c: c.fill(2.0)),
        (numpy.ones(()), lambda c: c.fill(2.0)),
        (ChainMap({"a": 1.0}), lambda c: c.update({"a": 2.0})),
    ],
    ids=["set", "deque", "array", "array without dimensions", "mapping"],
)
def test_contents_of_containers(container: Any, change: Callable[[Any], Any]) -> None:
    def number() -> float:
        if isinstance(container, set):
            return 1.0 if "a" in container else 2.0
        if isinstance(container, ChainMap):
            return float(container["a"])
        return float(container[0]) if len(getattr(container, "shape", (1,))) else float(container)

    step = tarry.compile(lambda x: (x * number()).sum())
    x = torch.ones(4, device="tarry")
    assert [step(x).item() for _ in range(6)] == [4.0] * 6
    assert step.replays
    change(container)
    assert step(x).item() == 8.0


def test_a_hook_in_the_place_of_another() -> None:
    layer = torch.nn.Linear(2, 1).to("tarry")
    handle = layer.register_forward_hook(lambda module, given, out: out * 0 + 1)
    step = tarry.compile(lambda x: layer(x).detach().sum())
    x = torch.ones(4, 2, device="tarry")
    assert [step(x).item() for _ in range(6)] == [4.0] * 6
    assert step.replays
    handle.remove()
    layer.register_forward_hook(lambda module, given, out: out * 0 + 2)
    assert step(x).item() == 8.0
