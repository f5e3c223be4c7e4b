"""Compiled programs by the hash of their graph, each checked against the graph's structure before it is run."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from tarry.backends.base import Step


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled step and the structure that a batch must have to be computed by it."""

    structure: Any
    step: Step


class ProgramCache:
    """Least recently used goes first. One key may hold several programs: a hash may collide, a program must not."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[int, int], list[Entry]] = OrderedDict()
        self._size = 0

    def find(self, batch: Any) -> Step | None:
        """The compiled step for a batch, if one was kept."""
        key = batch.key
        bucket = self._entries.get(key)
        if bucket is None:
            return None
        self._entries.move_to_end(key)
        for entry in bucket:
            if batch.matches(entry.structure):
                return entry.step
        return None

    def keep(self, batch: Any, step: Step, capacity: int) -> None:
        """Keep a step for batches of this structure."""
        self._entries.setdefault(batch.key, []).append(Entry(batch.structure(), step))
        self._size += 1
        while self._size > capacity:
            _, bucket = self._entries.popitem(last=False)
            self._size -= len(bucket)

    def clear(self) -> None:
        """Forget all programs."""
        self._entries.clear()
        self._size = 0

    def __len__(self) -> int:
        return self._size
