"""The one stream of events: what the runtime did, as it did it. Metrics, the log, reports and tests read it.

`kinds.py` says, as data, which kinds of events there are and what each carries; `stream.py` has `emit` and `subscribe`.
See docs/events.md.
"""

from __future__ import annotations

from tarry.events.kinds import FIELDS, KINDS, Field, Kind
from tarry.events.stream import (
    DEFAULTS,
    Event,
    attach,
    count_places_with,
    count_with,
    emit,
    expect,
    flush,
    record,
    subscribe,
    watched,
)

__all__ = [
    "DEFAULTS",
    "FIELDS",
    "KINDS",
    "Event",
    "Field",
    "Kind",
    "attach",
    "count_places_with",
    "count_with",
    "emit",
    "expect",
    "flush",
    "record",
    "subscribe",
    "watched",
]
