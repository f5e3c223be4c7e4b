"""Events as lines of the standard logger `tarry`.

Without TARRY_LOG (`tarry.config.log`), only what costs much is logged: a large step that is compiled in the background,
and when its program takes over. These come rarely, so nothing has to be watched for them. TARRY_LOG=recompile,sync,...
has every event of those topics logged, at the level INFO, and shown if the program has set up no logging of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from tarry.events.kinds import KINDS, TOPICS
from tarry.events.stream import DEFAULTS, Event, subscribe
from tarry.events.text import line

LARGE = 64
"""Operators of a step whose compile in the background is announced: smaller ones are ready before one has read it."""
MAX_LINES = 8
"""Of each kind, without TARRY_LOG; the rest is counted."""
WORTH = 1.0
"""Seconds of compiling from which a takeover is worth a line even of a smaller step."""

_log = logging.getLogger("tarry")


def checked(topics: Iterable[str]) -> frozenset[str]:
    """Names of topics, if there are such."""
    chosen = frozenset(topics)
    unknown = sorted(chosen - {*TOPICS, "all"})
    if unknown:
        raise ValueError(f"tarry.config.log (TARRY_LOG) knows {', '.join(TOPICS)} and all, not {', '.join(unknown)}")
    return frozenset(TOPICS) if "all" in chosen else chosen


class EventLog:
    """What is written to the log."""

    def __init__(self) -> None:
        self._topics: frozenset[str] = frozenset()
        self._said: dict[str, int] = {}
        self._stack = ExitStack()
        self._handler: logging.Handler | None = None
        self.quiet = False
        """Log nothing by default: a subscriber shows the events."""

    def choose(self, topics: Iterable[str]) -> None:
        """Log every event of these topics, and no others."""
        chosen = checked(topics)
        self._stack.close()
        self._topics = chosen
        if chosen:
            self._show()
            self._stack.enter_context(subscribe(self._write, live=False))

    def count(self, kind: str, fields: dict[str, Any]) -> None:
        """See each event, without having it made for that; say what costs much."""
        if kind not in ("compiling", "takeover") or self._topics or self.quiet:
            return
        known = DEFAULTS[kind] | fields
        is_large = known["operations"] >= LARGE or known["seconds"] >= WORTH
        if is_large and (kind == "takeover" or known["background"]):
            said = self._said[kind] = self._said.get(kind, 0) + 1
            if said <= MAX_LINES:
                _log.warning("tarry: %s", line(kind, known | {"remedy": ""}))

    def _write(self, event: Event) -> None:
        topic = KINDS[event.kind].topic
        is_recompile = event.kind == "compile" and event.fields["again"] and "recompile" in self._topics
        if topic in self._topics or is_recompile:
            _log.info("tarry: %s", line(event.kind, event.fields))

    def _show(self) -> None:
        """Show the lines that TARRY_LOG names, where no logging is set up."""
        if self._handler is None and not _log.hasHandlers():
            self._handler = logging.StreamHandler(sys.stderr)
            self._handler.setFormatter(logging.Formatter("%(message)s"))
            _log.addHandler(self._handler)
            _log.propagate = False
        if _log.getEffectiveLevel() > logging.INFO:
            _log.setLevel(logging.INFO)
