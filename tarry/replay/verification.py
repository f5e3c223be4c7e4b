"""When a call that could be replayed is recorded instead, to see whether it still does the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Verify: TypeAlias = Literal[0, 1] | None
"""Of `tarry.compile`: 1: every call; 0: none; None: some, densely at first."""

MEAN_GAP = 128
"""Replays between two verified calls, on average, in the long run."""
MAX_SWITCHES = 4
"""How often a replay is verified because other ones were used before it: some functions alternate at every call."""

_random = random.Random()  # not the program's generator: its seed must not decide what is verified


@dataclass
class Verification:
    """Which replays of one plan stand between verified calls: 1, 2, 4, ..., 64, then a random number of them. Never a
    fixed one: what a function does every so many calls must not hide from it."""

    verify: Verify
    last: int  # the number of the call that was recorded and compared last
    gap: int = 1
    left: int = 1
    switches: int = 0
    replayed: list[int] = field(default_factory=list)  # since then: the first call's number, the last one's, how many

    def is_due(self) -> bool:
        return self.verify == 1 or (self.verify is None and self.left <= 0)

    def note_replay(self, call: int) -> None:
        self.left -= 1
        if self.replayed:
            self.replayed[1] = call
            self.replayed[2] += 1
        else:
            self.replayed = [call, call, 1]

    def note_verified(self, call: int) -> None:
        self.last = call
        self.replayed = []
        if self.gap < MEAN_GAP:
            self.gap *= 2
        self.left = self.gap if self.gap < MEAN_GAP else 1 + int(_random.expovariate(1 / (MEAN_GAP - 1)))

    def note_switch(self) -> None:
        """Another plan was used since the last call with this one."""
        if self.switches < MAX_SWITCHES:
            self.switches += 1
            self.hasten()

    def hasten(self) -> None:
        """Have the next call verified."""
        self.left = 0

    def replayed_since(self) -> str:
        """The calls that were replayed since the last verified one, as text."""
        if not self.replayed:
            return f"no call was replayed since call {self.last}, the last verified one"
        first, last, count = self.replayed
        calls = f"call {first} was" if count == 1 else f"{count} calls, {first} to {last}, were"
        return f"{calls} replayed since call {self.last}, the last verified one"
