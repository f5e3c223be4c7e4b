"""What happened while a script ran under `tarry run`: steps, compiles, reads and fallbacks, with lines and costs."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.events.text import what

if TYPE_CHECKING:
    from tarry.events import Event


class Place(NamedTuple):
    """Something that happens at a line of the program."""

    what: str
    file: str
    line: int


@dataclass
class Cost:
    """How often it happened, what it took, and where in a library."""

    count: int = 0
    seconds: float = 0.0
    library: str = ""
    reason: str = ""

    def add(self, fields: dict[str, Any]) -> None:
        self.count += 1
        self.seconds += fields.get("seconds", 0.0)
        self.library = fields.get("library", "") or self.library
        self.reason = fields.get("reason", "") or self.reason


@dataclass(frozen=True)
class Step:
    """From one `optimizer.step()` to the next."""

    seconds: float
    compiled: bool


@dataclass
class Watch:
    """Collects events, some of which come later than they happen. Any thread may call it."""

    steps: list[Step] = field(default_factory=list)
    compiles: list[dict[str, Any]] = field(default_factory=list)
    reads: dict[Place, Cost] = field(default_factory=dict)
    fallbacks: dict[Place, Cost] = field(default_factory=dict)
    references: dict[str, int] = field(default_factory=dict)
    """Why steps ran on the reference path, and how often."""
    stored: int = 0
    syncs: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _last: float = field(default_factory=time.perf_counter)
    _ends: deque[float] = field(default_factory=deque)
    """When steps ended whose events may not have come yet."""
    _operations: list[int] = field(default_factory=lambda: [0, 0])
    """Since the last step: those that programs computed, and those that the reference path did."""

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event.kind:
                case "reference" | "interpreted":
                    reason = event.fields["reason"]
                    self.references[reason] = self.references.get(reason, 0) + 1
                case "sync":
                    self.syncs += 1
                    self._close_steps(event.time)
                    self._operations[event.fields["path"] in ("reference", "direct")] += event.fields["operations"]
                case "compile":
                    self.compiles.append(event.fields)
                case "store_hit":
                    self.stored += 1
                case "fallback":
                    self._cost(self.fallbacks, event.fields["op"], event.fields)
                case "read":
                    self._cost(self.reads, what("read", event.fields), event.fields)

    @staticmethod
    def _cost(table: dict[Place, Cost], what: str, fields: dict[str, Any]) -> None:
        place = Place(what, fields.get("file", ""), fields.get("line", 0))
        table.setdefault(place, Cost()).add(fields)

    def end_step(self) -> None:
        """`optimizer.step()` is over."""
        with self._lock:
            self._ends.append(time.perf_counter())

    def finish(self) -> None:
        """All events have come."""
        with self._lock:
            self._close_steps(math.inf)

    def _close_steps(self, until: float) -> None:
        while self._ends and self._ends[0] < until:
            end = self._ends.popleft()
            compiled, interpreted = self._operations
            self.steps.append(Step(end - self._last, compiled > interpreted))
            self._operations, self._last = [0, 0], end
