"""How long steps of a graph take, before a program from the background serves them and after: the event `takeover`."""

from __future__ import annotations

import statistics
from collections import deque
from time import perf_counter

from tarry import events
from tarry.backends.base import Recording
from tarry.runtime import limits


class Pace:
    """Of one graph: the times from one step to the next, which is what a user of a loop sees."""

    def __init__(self) -> None:
        self._last = 0.0  # when the last step was done; 0: the time since then says nothing
        self._before: deque[float] = deque(maxlen=limits.TAKEOVER_BEFORE)
        self._after: list[float] = []
        self._compiled_in: float | None = None  # the program's making took so long; None: there is none to report
        self.recording: Recording | None = None
        """What is being compiled."""
        self.backend = ""

    @property
    def is_measured(self) -> bool:
        """Whether steps with the new program are being timed: Python has to see them."""
        return self._compiled_in is not None

    @property
    def is_known(self) -> bool:
        """Whether Python has seen enough steps without a program to compare with."""
        return len(self._before) >= limits.TAKEOVER_STEPS

    def without_program(self) -> None:
        """A step was computed by the reference path."""
        self._tick(self._before)

    def take_over(self, seconds: float) -> None:
        """The program is there, which took so long to make."""
        self._compiled_in, self._last = seconds, 0.0  # its first run is unlike the others

    def with_program(self) -> None:
        """The program has computed a step. Reports the takeover when enough is known of it."""
        self._tick(self._after)
        if len(self._after) < limits.TAKEOVER_STEPS:
            return
        recording, seconds = self.recording, self._compiled_in
        assert recording is not None
        assert seconds is not None
        before, after = (statistics.median(times) if times else 0.0 for times in (self._before, self._after))
        events.emit(
            "takeover",
            operations=recording.num_operations,
            seconds=seconds,
            before=before,
            after=after,
            backend=self.backend,
            lines=recording.lines,
            reason="its program is ready",
            **recording.place,
        )
        self._compiled_in = self.recording = None

    def _tick(self, times: deque[float] | list[float]) -> None:
        now = perf_counter()
        if self._last:
            times.append(now - self._last)
        self._last = now
