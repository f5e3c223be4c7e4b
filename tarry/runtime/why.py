"""One line that says why a graph is compiled again, as long as such lines are few."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from tarry.ir.difference import alike, difference
from tarry.ir.graph import Graph

LINES = 8
"""Reasons that a process prints; those after are only counted."""
REMEMBERED = 64
"""Graphs that a new one is compared with, one for each sequence of operators; the oldest goes first."""

_logger = logging.getLogger("tarry")
_lock = threading.Lock()
_said = 0


class KnownGraphs:
    """The graphs that have been compiled, as they were recorded."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[int, Graph] = OrderedDict()
        self._lock = threading.Lock()

    def reason(self, recorded: Graph) -> str:
        """Why a graph is none of those that are known; empty if none is like it."""
        with self._lock:
            known = self._graphs.get(alike(recorded))
        return "" if known is None else difference(known, recorded) or ""

    def remember(self, recorded: Graph) -> None:
        key = alike(recorded)
        with self._lock:
            self._graphs[key] = recorded
            self._graphs.move_to_end(key)
            while len(self._graphs) > REMEMBERED:
                self._graphs.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._graphs.clear()


def say(reason: str) -> None:
    """Print why something is compiled again."""
    global _said
    if not reason:
        return
    with _lock:
        _said += 1
        count = _said
    if count <= LINES:
        _logger.warning("tarry: recompiling: %s", reason)
    elif count == LINES + 1:
        _logger.warning("tarry: recompiling more; from here on that is only counted: see tarry.metrics.report()")
