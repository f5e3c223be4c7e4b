"""Why a call cannot be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tarry.replay.capture import Capture


class NotReplayableError(Exception):
    """Why a call cannot be replayed. Not an error of the program: the call was recorded, and its results are right."""


class DisturbedError(NotReplayableError):
    """Something else was going on during the call: it shows nothing about the function."""


class CountedOnHostError(NotReplayableError):
    """All that stands in the way is that optimizers count their steps on the host."""

    def __init__(self, name: str | None, optimizers: list[torch.optim.Optimizer], capture: Capture) -> None:
        super().__init__(
            f"it changes {name}, a tensor on the host, which a replay would not: give the optimizer capturable=True"
        )
        self.optimizers = optimizers
        self.capture = capture


def where(location: Sequence[Any]) -> str:
    """A place in the user's program: a file and a line."""
    file, line = location
    return f"{file}:{line}" if file else "an unknown line"
