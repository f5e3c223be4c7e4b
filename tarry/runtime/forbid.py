"""`with tarry.no_recompile():` from here on, a graph that has no program is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tarry.errors import RecompileError


class RecompileGuard:
    """How many such blocks the process is in, on whichever thread: steps are the process's, not a thread's."""

    def __init__(self) -> None:
        self._depth = 0
        self._lock = threading.Lock()

    @contextmanager
    def block(self) -> Iterator[None]:
        with self._lock:
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1

    def check(self, why: Callable[[], str]) -> None:
        """A program is about to be made."""
        if self._depth:
            raise RecompileError(
                f"inside tarry.no_recompile(), a step needs a new program: {why()}. Nothing is lost: all is still "
                f"pending, and is computed after the block."
            )
