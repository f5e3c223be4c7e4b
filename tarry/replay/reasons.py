"""Why a call cannot be replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tarry.replay.evidence import Evidence


class NotReplayableError(Exception):
    """Why a call cannot be replayed. Not an error of the program: the call was recorded, and its results are right."""


class CountedOnHostError(NotReplayableError):
    """All that stands in the way is that optimizers count their steps on the host."""

    def __init__(self, name: str | None, optimizers: list[torch.optim.Optimizer], evidence: Evidence) -> None:
        super().__init__(
            f"it changes {name}, a tensor on the host, which a replay would not: give the optimizer capturable=True"
        )
        self.optimizers = optimizers
        self.evidence = evidence


def where(location: tuple[str, int]) -> str:
    """A place in the user's program."""
    file, line = location
    return f"{file}:{line}" if file else "an unknown line"
