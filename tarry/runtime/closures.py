"""Functions that run when a step's values are there: at once, or without holding up the step that asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from tarry.native import C
from tarry.runtime import limits


@dataclass(frozen=True)
class _Closure:
    function: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    run_async: bool

    def call(self) -> None:
        """Call the function with copies on the host, unless one of them could not be computed."""
        try:
            values = [tensor.cpu() for tensor in self.tensors]
        except Exception:
            return
        self.function(*values)


class StepClosures:
    """Waiting closures. When the step is done, they run in order, on the thread that ended it; those that are
    asynchronous run on a thread of their own.

    A step that failed is done, too. A closure whose values could be computed runs; one that would read what failed does
    not: the error is raised where the step was computed. After an interrupt the step is not done, and they wait.
    """

    def __init__(self) -> None:
        self._waiting: list[_Closure] = []
        self._queue: SimpleQueue[_Closure] = SimpleQueue()
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._unfinished = 0
        self._done = threading.Condition(self._lock)
        self._errors: list[BaseException] = []

    def add(self, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], run_async: bool) -> None:
        """Remember a closure for the end of the current step. Its tensors are snapshots: later writes do not show."""
        snapshots = tuple(tensor.detach().clone() for tensor in tensors)
        with self._lock:
            self._waiting.append(_Closure(function, snapshots, run_async))
            C.set_watched("closure", True)

    def run(self, *, failed: bool = False) -> None:
        """The step is done: run the waiting closures, or hand them to the worker. The first error, of these or of
        asynchronous ones before, is raised here, unless the step has failed and has an error of its own."""
        if not self._waiting and not self._errors:
            return
        now, later = self._take()
        for closure in later:
            self._queue.put(closure)
        for closure in now:
            try:
                closure.call()
            except Exception as error:
                self._keep(error)
        if not failed:
            self._raise()

    def _take(self) -> tuple[list[_Closure], list[_Closure]]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            later = [closure for closure in waiting if closure.run_async]
            self._unfinished += len(later)
            C.set_watched("closure", bool(self._errors))
            if later and self._worker is None:
                self._worker = threading.Thread(target=self._work, name="tarry-closures", daemon=True)
                self._worker.start()
        return [closure for closure in waiting if not closure.run_async], later

    def wait(self) -> None:
        """Wait until all closures handed over have run; raise what one of them raised."""
        with self._done:
            self._done.wait_for(lambda: self._unfinished == 0)
        self._raise()

    def finish(self) -> None:
        """At the end of the process: let closures that were handed over run, for a while at most."""
        with self._done:
            self._done.wait_for(lambda: self._unfinished == 0, limits.EXIT_CLOSURES_SECONDS)

    def _keep(self, error: BaseException) -> None:
        with self._lock:
            self._errors.append(error)
            C.set_watched("closure", True)

    def _raise(self) -> None:
        with self._lock:
            if self._errors:
                error, self._errors = self._errors[0], []
                C.set_watched("closure", bool(self._waiting))
                raise error

    def _work(self) -> None:
        while True:
            closure = self._queue.get()
            try:
                closure.call()
            except BaseException as error:
                self._keep(error)
            finally:
                del closure  # its tensors
                with self._done:
                    self._unfinished -= 1
                    self._done.notify_all()
