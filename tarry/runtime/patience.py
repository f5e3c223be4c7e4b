"""Not every graph is worth compiling: those that come round again are."""

from __future__ import annotations

from collections.abc import Callable

from tarry import events
from tarry.backends.base import Batch, Step


class PatientStep:
    """Runs on the reference path until the graph has been seen a few times, and is compiled then.

    For a backend that nobody asked for by name: a program that makes many small graphs once each, or that only wants
    to look at a number, must not wait for a compiler.
    """

    def __init__(self, compile_step: Callable[[Batch], Step], runs: int) -> None:
        self._compile = compile_step
        self._runs = runs
        self._step: Step | None = None

    def __call__(self, batch: Batch) -> None:
        if self._step is None and self._runs > 0:
            self._runs -= 1
            events.emit("reference")
            batch.interpret(interruptible=False)
            return
        if self._step is None:
            self._step = self._compile(batch)
        self._step(batch)
