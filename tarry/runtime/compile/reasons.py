"""Why a graph is compiled again: one line in the log, as long as such lines are few, or an error."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from tarry.backends.base import Recording
from tarry.errors import RecompileError
from tarry.ir.difference import alike, difference
from tarry.ir.graph import Graph
from tarry.native import C
from tarry.runtime import limits

_logger = logging.getLogger("tarry")
FIRST = "the graph is new: none like it was compiled before"


class KnownGraphs:
    """The graphs that have been compiled, as they were recorded; of each device by itself."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[tuple[int, int], Graph] = OrderedDict()
        self._lock = threading.Lock()

    def reason(self, recording: Recording) -> str:
        """Why a graph is none of those that are known; empty if none is like it."""
        recorded = recording.recorded
        with self._lock:
            known = self._graphs.get((recording.device, alike(recorded)))
        return "" if known is None else difference(known, recorded) or ""

    def remember(self, recording: Recording) -> None:
        key = recording.device, alike(recording.recorded)
        with self._lock:
            self._graphs[key] = recording.recorded
            self._graphs.move_to_end(key)
            while len(self._graphs) > limits.MAX_KNOWN_GRAPHS:
                self._graphs.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._graphs.clear()


class Reasons:
    """Which reasons are printed: a few of each call site, and a few of steps of about the same size. The lines of many
    small graphs must not displace the one line about the training step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """As if no line had been printed."""
        self._of_site: Counter[Hashable] = Counter()
        self._of_size: Counter[int] = Counter()
        self._closed = False

    def say(self, reason: str, site: Hashable, operations: int) -> None:
        """Print why a step is compiled again."""
        if not reason:
            return
        size = operations.bit_length() // 2  # 1 to 3 operators, 4 to 15, 16 to 63, ...
        with self._lock:
            few = self._of_site[site] < limits.MAX_REASONS_PER_SITE and self._of_size[size] < limits.MAX_REASONS
            if few:
                self._of_site[site] += 1
                self._of_size[size] += 1
            last = not few and not self._closed
            self._closed |= last
        if few:
            _logger.warning("tarry: recompiling: %s", reason)
        elif last:
            _logger.warning("tarry: recompiling more of the kind; that is only counted: see tarry.metrics.report()")


reasons = Reasons()
"""Those of this process."""


class NoRecompile:
    """How many `tarry.no_recompile()` blocks the process is in, on any thread: graphs belong to the process."""

    def __init__(self) -> None:
        self._depth = 0
        self._lock = threading.Lock()

    @property
    def active(self) -> bool:
        return self._depth > 0

    @contextmanager
    def block(self) -> Iterator[None]:
        with self._lock:
            self._depth += 1
            C.hold_direct_calls(True)  # a new graph would be noticed too late
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                C.hold_direct_calls(self._depth > 0)

    @staticmethod
    def error(why: str) -> RecompileError:
        return RecompileError(
            f"inside tarry.no_recompile(), a step needs a new program: {why}. Nothing is lost: all is still pending, "
            f"and is computed after the block."
        )
