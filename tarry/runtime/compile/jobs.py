"""Jobs in the background: graphs are compiled one after the other, on threads beside the user's."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from tarry.native import C
from tarry.runtime import limits
from tarry.runtime.compile.process import CompileProcess, StoppedError
from tarry.runtime.dispatch import compiling

T = TypeVar("T")


class _Stop(BaseException):
    """The process ends, or the backend is gone: the program that is being made has no use any more."""


_working = threading.local()
_waiters = 0  # threads that wait for a job: it makes no pauses then


def yield_to_user() -> None:
    """Between two pieces of a job, on its thread: let the user's thread have the interpreter for a while. A job that
    works without a pause would stop the user's program for as long as it takes."""
    since = getattr(_working, "since", None)
    if since is None:
        return
    if not _waiters:
        time.sleep(min(limits.MAX_PAUSE, limits.IDLENESS * (time.thread_time() - since)))
    _working.since = time.thread_time()


class _Waiting:
    def __enter__(self) -> None:
        global _waiters
        _waiters += 1

    def __exit__(self, *exc_info: object) -> None:
        global _waiters
        _waiters -= 1


class Job(Generic[T]):
    """Work for the background: `done`, then either `result` or `error`."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._finished = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        """What it took."""

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def stopped(self) -> bool:
        """Whether it was broken off, or never begun: it may be tried again."""
        return isinstance(self.error, _Stop | StoppedError)

    def wait(self) -> None:
        with _Waiting():
            self._finished.wait()

    def run(self) -> None:
        work, self._work = self._work, None
        start = time.perf_counter()
        try:
            if work is not None:
                self.result = work()
        except BaseException as error:
            self.error = error
        finally:
            self.seconds = time.perf_counter() - start
            self._finish()

    def cancel(self) -> None:
        """Do not run it."""
        self._work = None
        self.error = _Stop()
        self._finish()

    def _finish(self) -> None:
        self._finished.set()
        C.withdraw_references()  # the engine looks at the outcome when the graph comes next


class Background:
    """Jobs in the order in which they came, one at a time."""

    def __init__(self, process: CompileProcess) -> None:
        """`process` is what the running job may wait for."""
        self._process = process
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Job[object]] = deque()
        self._running: Job[object] | None = None
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Do some work when its turn comes."""
        job = Job(work)
        with self._changed:
            self._waiting.append(job)  # type: ignore[arg-type]
            if self._running is None:
                self._start()
        return job

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; False if that took longer."""
        with _Waiting(), self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._running is None, timeout)

    @property
    def full(self) -> bool:
        """Whether so much waits that more had better not."""
        return len(self._waiting) >= limits.MAX_QUEUED_JOBS

    def forget(self) -> None:
        """Drop what is waiting, and wait for what is running: its backend is about to go."""
        if self._owner != os.getpid() or not self._drop():
            return
        self._process.interrupt()
        while not self.wait(limits.STOP_POLL_SECONDS):
            self._process.interrupt()  # the job may have begun to wait just now

    def close(self) -> None:
        """The process ends. Python would stop a thread that is still compiling anywhere, perhaps in a destructor of
        C++, which takes the process with it; so interrupt the job, and give it a moment."""
        if self._owner != os.getpid() or not self._drop():
            return
        self._process.interrupt()
        if not self.wait(limits.EXIT_POLITE_SECONDS) and self._thread is not None and self._thread.ident is not None:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(self._thread.ident), ctypes.py_object(_Stop))
            self.wait(limits.EXIT_SECONDS)

    def after_fork(self) -> None:
        """In the child: the thread exists in the parent only, with whatever it held."""
        self._reset()

    def _drop(self) -> bool:
        """Drop what is waiting. Whether something is still running."""
        with self._changed:
            while self._waiting:
                self._waiting.popleft().cancel()
            self._changed.notify_all()
            return self._running is not None

    def _start(self) -> None:
        """Begin the next job, with the lock held. Each has a thread of its own: a new thread finds settings of the
        process (the number of threads, Inductor's configuration) as they are now, an old one as it has met them."""
        self._running = job = self._waiting.popleft()
        self._thread = threading.Thread(target=self._work, args=(job,), name="tarry-background", daemon=True)
        self._thread.start()

    def _work(self, job: Job[object]) -> None:
        with suppress(_Stop):  # it may come late
            try:
                _working.since = time.thread_time()
                with compiling():
                    job.run()
            finally:
                with self._changed:
                    self._running = None
                    if self._waiting:
                        self._start()
                    self._changed.notify_all()
