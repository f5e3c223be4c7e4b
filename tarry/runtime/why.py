"""One line that says why a graph is compiled again, as long as such lines are few."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable

from tarry.ir.difference import alike, difference
from tarry.ir.graph import Graph

LINES = 8
"""Reasons that a process prints of steps of about the same size; those after are only counted."""
LINES_OF_PLACE = 3
"""Of those, how many may be of one place."""
REMEMBERED = 64
"""Graphs that a new one is compared with, one for each sequence of operators; the oldest goes first."""

_logger = logging.getLogger("tarry")


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


class Reasons:
    """Which reasons are printed: a few of each place, and a few of steps of about the same size. What many small graphs
    have to say must not keep the one line from being read that is about the training step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """As if nothing had been said."""
        self._of_place: Counter[Hashable] = Counter()
        self._of_size: Counter[int] = Counter()
        self._closed = False

    def say(self, reason: str, place: Hashable, operations: int) -> None:
        """Print why a step is compiled again."""
        if not reason:
            return
        size = operations.bit_length() // 2  # 1 to 3 operators, 4 to 15, 16 to 63, ...
        with self._lock:
            few = self._of_place[place] < LINES_OF_PLACE and self._of_size[size] < LINES
            if few:
                self._of_place[place] += 1
                self._of_size[size] += 1
            last = not few and not self._closed
            self._closed |= last
        if few:
            _logger.warning("tarry: recompiling: %s", reason)
        elif last:
            _logger.warning("tarry: recompiling more of the kind; that is only counted: see tarry.metrics.report()")


reasons = Reasons()
"""Those of this process."""
