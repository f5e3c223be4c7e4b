"""Functions that run when a step's values are there, without holding up the step that asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from tarry.native import C
from tarry.runtime import limits


class StepClosures:
    """Waiting closures. Their values are read when the step is done; they run on a thread of their own, in order.

    A step that failed is done, too. A closure whose values could be computed runs; one that would read what failed does
    not: the error is raised where the step was computed. After an interrupt the step is not done, and they wait.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = []
        self._queue: SimpleQueue[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._unfinished = 0
        self._done = threading.Condition(self._lock)
        self._errors: list[BaseException] = []

    def add(self, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> None:
        """Remember a closure for the end of the current step. Its tensors are snapshots: later writes do not show."""
        snapshots = tuple(tensor.detach().clone() for tensor in tensors)
        with self._lock:
            self._waiting.append((function, snapshots))
            C.set_watched("closure", True)

    def run(self, *, failed: bool = False) -> None:
        """The step is done: hand the waiting closures to the worker. Errors of earlier ones are raised here, unless the
        step has failed and has an error of its own."""
        if not self._waiting and not self._errors:
            return
        with self._lock:
            if self._errors and not failed:
                error, self._errors = self._errors[0], []
                raise error
            waiting, self._waiting = self._waiting, []
            self._unfinished += len(waiting)
            C.set_watched("closure", bool(self._errors))
            if waiting and self._worker is None:
                self._worker = threading.Thread(target=self._work, name="tarry-closures", daemon=True)
                self._worker.start()
        for function, tensors in waiting:
            self._queue.put((function, tensors))

    def wait(self) -> None:
        """Wait until all closures handed over have run; raise what one of them raised."""
        with self._done:
            self._done.wait_for(lambda: self._unfinished == 0)
            if self._errors:
                error, self._errors = self._errors[0], []
                raise error

    def finish(self) -> None:
        """At the end of the process: let closures that were handed over run, for a while at most."""
        with self._done:
            self._done.wait_for(lambda: self._unfinished == 0, limits.EXIT_CLOSURES_SECONDS)

    def _work(self) -> None:
        while True:
            function, tensors = self._queue.get()
            try:
                values = _values(tensors)
                if values is not None:
                    function(*values)
            except BaseException as error:
                with self._lock:
                    self._errors.append(error)
                    C.set_watched("closure", True)
            finally:
                with self._done:
                    self._unfinished -= 1
                    self._done.notify_all()


def _values(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor] | None:
    """Copies on the host; None if one of them could not be computed."""
    try:
        return [tensor.cpu() for tensor in tensors]
    except Exception:
        return None
