"""The one stream of events: what the runtime did, as it did it. Metrics, tests and tools read it; nothing else counts.

Events happen per step or rarer (recording an operator is counted in the native part, see `tarry.metrics`):
`sync`, `compiling` (a compile begins), `compile` (it is done), `cache_hit`, `execute`, `fallback`, `transfer`, `error`;
`read` (under `tarry run`: the program has waited for a value); `reference` (a step without a program, or
without one yet), `interpreted` (a step that the backend cannot compile); `store_hit`, `store_miss`, `store_skip`,
`store_evict`, `store_corrupt` (programs on disk); `pieces` (a graph is compiled in pieces: how many calls, of how many
kinds); `compile_here` (what the process that compiles in the background could not); `replay`, `replay_guard_failed`,
`replay_verified`, `replay_deviation` (tarry.compile).

Fields that several have: `seconds`, what it cost; `file` and `line`, the user's line (`places.py`), and `library`, the
line of a library that the user's line has called and that the operator is in, or "". Without a subscriber, `sync` has
no line: finding it costs microseconds.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Event:
    """One thing that happened. Not to be changed; a frozen class would take three times as long to make."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.perf_counter)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{k}={v!r}' for k, v in self.fields.items())})"


_subscribers: list[Callable[[Event], None]] = []
_counters: list[Callable[[str, dict[str, Any]], None]] = []
_lock = threading.Lock()
_watched: Callable[[bool], None] = lambda watched: None  # noqa: E731 - replaced when the native part is loaded


def emit(kind: str, **fields: Any) -> None:
    """Notify every subscriber. What a subscriber raises reaches the caller; tarry's own raise nothing."""
    for count in _counters:
        count(kind, fields)
    if _subscribers:
        event = Event(kind, fields)
        for subscriber in tuple(_subscribers):
            subscriber(event)


def watched() -> bool:
    """Whether there is a subscriber: what is costly to find out is found out for one only."""
    return bool(_subscribers)


@contextmanager
def subscribe(subscriber: Callable[[Event], None]) -> Iterator[None]:
    """Within the block, `subscriber(event)` is called for each event, on the thread where it happens."""
    with _lock:
        _subscribers.append(subscriber)
        _watched(True)
    try:
        yield
    finally:
        with _lock:
            _subscribers.remove(subscriber)
            _watched(bool(_subscribers))


def attach(watched: Callable[[bool], None]) -> None:
    """Have `watched(True)` called when there is a subscriber, `watched(False)` when there is none any more."""
    global _watched
    with _lock:
        _watched = watched
        watched(bool(_subscribers))


def count_with(counter: Callable[[str, dict[str, Any]], None]) -> None:
    """From now on, `counter(kind, fields)` is called for each event: an Event takes longer to make than to count."""
    _counters.append(counter)


@contextmanager
def record() -> Iterator[list[Event]]:
    """Within the block, events are appended to the list it gives."""
    seen: list[Event] = []
    with subscribe(seen.append):
        yield seen


_PLURALS = {
    "syncs": "sync",
    "compiles": "compile",
    "cache_hits": "cache_hit",
    "executes": "execute",
    "fallbacks": "fallback",
    "errors": "error",
}


@contextmanager
def expect(**counts: int) -> Iterator[list[Event]]:
    """Assert the work done in a block: `with expect(compiles=1, syncs=1, fallbacks=0):`."""
    unknown = set(counts) - set(_PLURALS)
    if unknown:
        raise TypeError(f"expect() knows {', '.join(sorted(_PLURALS))}, not {', '.join(sorted(unknown))}")
    with record() as seen:
        yield seen
    happened = Counter(event.kind for event in seen)
    wrong = [
        f"{name}: expected {expected}, happened {happened[_PLURALS[name]]}"
        for name, expected in counts.items()
        if happened[_PLURALS[name]] != expected
    ]
    if wrong:
        raise AssertionError("; ".join(wrong) + "\n" + "\n".join(f"  {event}" for event in seen))
