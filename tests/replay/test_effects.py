"""Calls that have effects besides their results: a replay would not, so they are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tarry
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


class Trainer:
    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.done = False

    def keeps_and_returns(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last

    def keeps_by_name(self, x: Tensor) -> Tensor:
        result = x * 2
        setattr(self, "last", result)  # noqa: B010
        return result

    def says_so(self, x: Tensor) -> Tensor:
        self.done = True
        return x * 2


@pytest.mark.parametrize("name", ["keeps_and_returns", "keeps_by_name"])
def test_a_result_that_is_kept_as_well(name: str) -> None:
    trainer = Trainer()
    step = tarry.compile(getattr(trainer, name))
    for k in range(5):
        step(torch.full((3,), float(k), device="tarry"))
        assert trainer.last is not None
        assert trainer.last.tolist() == [2.0 * k] * 3
    assert step.replays == 0
    assert "changes its surroundings: self.last" in step.explain()


def test_a_flag_that_is_set() -> None:
    trainer = Trainer()
    step = tarry.compile(trainer.says_so, verify=0)
    for _ in range(5):
        trainer.done = False
        step(torch.ones(3, device="tarry"))
        assert trainer.done


def _adds(batch: dict[str, Any]) -> None:
    batch["y"] = batch["x"] * 2


def _replaces(batch: dict[str, Any]) -> None:
    batch["x"] = batch["x"] * 2


def _counts(batch: dict[str, Any]) -> None:
    batch["x"] = batch["x"] * 2
    batch["n"] += 1


def _appends(batch: dict[str, Any]) -> None:
    batch["list"].append(batch["x"] * 2)


def _transposes(batch: dict[str, Any]) -> None:
    batch["x"].mul_(2).t_()


@pytest.mark.parametrize("change", [_adds, _replaces, _counts, _appends, _transposes])
def test_arguments_that_are_changed(change: Callable[[dict[str, Any]], None]) -> None:
    def function(batch: dict[str, Any]) -> Tensor:
        change(batch)
        return batch["x"] + 1

    def batch() -> dict[str, Any]:
        return {"x": torch.arange(6.0, device="tarry").view(2, 3), "n": 0, "list": []}

    expected = batch()
    function(expected)
    step = tarry.compile(function, verify=0)
    for _ in range(5):
        given = batch()
        step(given)
        assert given.keys() == expected.keys()
        assert given["n"] == expected["n"]
        assert len(given["list"]) == len(expected["list"])
        assert given["x"].tolist() == expected["x"].tolist()
    assert step.replays == 0
    assert "argument" in step.explain()
