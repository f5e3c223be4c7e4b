"""Emitting events, and subscribing to them. The kinds are in `kinds.py`.

Events happen per step or rarer (recording an operator is counted in the native part, see `tarry.metrics`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tarry.events.kinds import COMMON, FIELDS, KINDS

_log = logging.getLogger("tarry")
DEFAULTS: dict[str, dict[str, Any]] = {
    kind.name: {name: FIELDS[name].default for name in COMMON + kind.fields} | {"remedy": kind.remedy}
    for kind in KINDS.values()
}


@dataclass(slots=True)
class Event:
    """One thing that happened. Not to be changed; a frozen class would take three times as long to make."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.perf_counter)
    thread: int = field(default_factory=threading.get_ident)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{k}={v!r}' for k, v in self.fields.items())})"


class Source(Protocol):
    """What the native part does about events: see csrc/execute/event_log.h."""

    def set_watched(self, watcher: str, watches: bool, /) -> None: ...
    def set_logging(self, on: bool, /) -> None: ...
    def take_events(self) -> tuple[list[tuple[str, dict[str, Any], float, int]], int]: ...


@dataclass(eq=False)
class _Subscription:
    """A subscriber, and the first error that it has raised: a program must not fail because of a subscriber."""

    subscriber: Callable[[Event], None]
    live: bool
    error: Exception | None = None

    def deliver(self, event: Event) -> None:
        if self.error is not None:
            return
        try:
            self.subscriber(event)
        except Exception as error:
            self.error = error
            _log.exception("tarry: a subscriber of events failed, and gets no more of them")


_subscriptions: list[_Subscription] = []
_counters: list[Callable[[str, dict[str, Any]], None]] = []
_place_counters: list[Callable[[str, dict[str, Any]], None]] = []
_lock = threading.RLock()
_source: Source | None = None  # when the native part is loaded


def emit(kind: str, **fields: Any) -> None:
    """Something has happened: `kind` and `fields` are those of `KINDS`; what is left out has its default."""
    for count in _counters:
        count(kind, fields)
    if _subscriptions:
        flush()  # what has happened before
        _deliver(kind, fields, time.perf_counter(), threading.get_ident())


def _deliver(kind: str, fields: dict[str, Any], time: float, thread: int) -> None:
    filled = DEFAULTS[kind] | fields
    assert len(filled) == len(DEFAULTS[kind]), f"{kind} has fields that kinds.py does not name: {fields.keys()}"
    event = Event(kind, filled, time, thread)
    for subscription in tuple(_subscriptions):
        subscription.deliver(event)


def flush() -> None:
    """Deliver what has happened without Python since the last time, to subscribers that are not `live`."""
    if _source is None or all(subscription.live for subscription in _subscriptions):
        return
    taken, lost = _source.take_events()
    for kind, fields, when, thread in taken:  # counted already
        for note in _place_counters:
            note(kind, fields)
        _deliver(kind, fields, when, thread)
    if lost:
        _log.warning("tarry: %d events came too fast, and are lost", lost)


def watched() -> bool:
    """Whether there is a subscriber: what is costly to find out is found out for one only."""
    return bool(_subscriptions)


@contextmanager
def subscribe(subscriber: Callable[[Event], None], *, live: bool = True) -> Iterator[None]:
    """Within the block, `subscriber(event)` is called for each event, on the thread where it happens.

    If it need not be `live`, steps and reads that happen without Python go on doing so: they are delivered later, many
    at a time, each with the `time` when it happened. `flush()` delivers at once; so does the end of the block.

    A subscriber that raises gets no more events, and its error is raised at the end of the block."""
    subscription = _Subscription(subscriber, live)
    with _lock:
        flush()
        _subscriptions.append(subscription)
        _update_source()
    try:
        yield
    finally:
        with _lock:
            flush()
            _subscriptions.remove(subscription)
            _update_source()
    if subscription.error is not None:
        raise subscription.error


def _update_source() -> None:
    if _source is not None:
        _source.set_watched("subscriber", any(subscription.live for subscription in _subscriptions))
        _source.set_logging(any(not subscription.live for subscription in _subscriptions))


def attach(source: Source) -> None:
    """Give the native part, in which some events happen."""
    global _source
    with _lock:
        _source = source
        _update_source()


def count_with(counter: Callable[[str, dict[str, Any]], None]) -> None:
    """From now on, `counter(kind, fields)` is called for each event that happens in Python: to make an Event takes
    longer than to count. What the native part does by itself it also counts by itself."""
    _counters.append(counter)


def count_places_with(counter: Callable[[str, dict[str, Any]], None]) -> None:
    """From now on, `counter(kind, fields)` is called for each event that the native part has logged, and counted."""
    _place_counters.append(counter)


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
