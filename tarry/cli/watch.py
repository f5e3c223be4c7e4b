"""What happened while a script ran under `tarry run`: steps, compiles, reads and fallbacks, with lines and costs."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tarry.events import Event

READS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "to",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__repr__",
    "__array__",
)
"""Methods of a tensor that may wait for its value."""


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
    """Collects events. Any thread may call it."""

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
    _interpreted: bool = False
    _operations: list[int] = field(default_factory=lambda: [0, 0])
    """Since the last step: those that programs computed, and those that the reference path did."""

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event.kind:
                case "reference" | "interpreted":
                    self._interpreted = True
                    reason = event.fields["reason"]
                    self.references[reason] = self.references.get(reason, 0) + 1
                case "sync":
                    self.syncs += 1
                    self._operations[self._interpreted] += event.fields["operations"]
                    self._interpreted = False
                case "compile":
                    self.compiles.append(event.fields)
                case "store_hit":
                    self.stored += 1
                case "fallback":
                    self._cost(self.fallbacks, event.fields["op"], event.fields)
                case "read":
                    self._cost(self.reads, event.fields["method"], event.fields)

    @staticmethod
    def _cost(table: dict[Place, Cost], what: str, fields: dict[str, Any]) -> None:
        place = Place(what, fields.get("file", ""), fields.get("line", 0))
        table.setdefault(place, Cost()).add(fields)

    def end_step(self) -> None:
        """`optimizer.step()` is over."""
        now = time.perf_counter()
        with self._lock:
            compiled, interpreted = self._operations
            self.steps.append(Step(now - self._last, compiled > interpreted))
            self._operations = [0, 0]
            self._last = now


def watch_reads(tensor: Any, emit: Callable[..., None], place: Callable[[], dict[str, Any]]) -> None:
    """Have an event `read` emitted when a program has waited for a value of a recorded tensor. For good: it is done
    once, before a script runs. `tensor` is torch.Tensor."""
    inside = threading.local()

    def watched(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.device.type != "tarry" or getattr(inside, "now", False):
                return original(self, *args, **kwargs)
            inside.now = True
            start = time.perf_counter()
            try:
                result = original(self, *args, **kwargs)
            finally:
                inside.now = False
            if name != "to" or result.device.type == "cpu":
                emit("read", method=name, seconds=time.perf_counter() - start, **place())
            return result

        return read

    for name in READS:
        setattr(tensor, name, watched(name, getattr(tensor, name)))
