"""Compiling in other processes (`worker.py`): started when they are needed, killed when this one ends.

A worker takes one graph at a time. The graphs of one step (passes/pieces.py) go to several workers, where there are
cores for them.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

from tarry.backends.base import Backend
from tarry.errors import BackendError, Unsupported
from tarry.ir.graph import Graph
from tarry.ir.sizes import Symbols
from tarry.ir.text import to_text
from tarry.runtime import limits


class CannotError(Exception):
    """The other process cannot compile this; there is nothing wrong with the graph."""


class StoppedError(Exception):
    """The compile was interrupted: its program has no use any more."""


class _DiedError(Exception):
    pass


class CompileProcess:
    """A worker, if there is one; it takes one request at a time."""

    def __init__(self, compilers: int = 1) -> None:
        """`compilers`: how many of them (of Triton's and C++'s kernels) it may run at once."""
        self._compilers = compilers
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None  # to the process
        self._errors: IO[bytes] | None = None
        self._busy = False
        self._stopped = False
        self._is_ready = False  # the process has said so
        self._useless = ""  # why no worker can be started

    def compile(self, backend: Backend, graph: Graph, symbols: Symbols | None = None) -> bytes:
        """The artifact of the program; of a graph whose sizes vary, `symbols` are those of the graph at hand. Raises
        CannotError, StoppedError, or what the compiler raised."""
        recipe = backend.recipe()
        if recipe is None:
            raise CannotError(f"backend {backend.name!r} has no recipe")
        request = (*_names(type(backend)), recipe, to_text(graph), symbols)
        with self._lock:
            self._busy, self._stopped = True, False
        try:
            return self._ask(type(backend), request)
        finally:
            with self._lock:
                self._busy = False

    def _ask(self, kind: type[Backend], request: tuple[Any, ...]) -> bytes:
        how = ""
        for _ in range(limits.WORKER_ATTEMPTS):
            self._ensure_started(kind)
            try:
                return _result(*self._exchange(request))
            except _DiedError as error:
                if self._stopped:
                    raise StoppedError("the compile was stopped") from None
                how = str(error)
        raise BackendError(f"the process that compiles in the background died: {how}")

    def interrupt(self) -> None:
        """End what is being compiled."""
        with self._lock:
            if self._busy:
                self._stopped = True
                self._kill()

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._stopped = True
            self._kill()

    def after_fork(self) -> None:
        """In the child: the worker is the parent's. Close our end of its pipe, so that it ends with the parent."""
        if self._process is not None:
            self._process.returncode = 0  # the parent waits for it
        if self._pipe is not None:
            self._pipe.close()
        self._reset()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    # ---- its life

    def start(self, kind: type[Backend]) -> None:
        """Start the process if it does not run, to compile for that backend. Does not wait for it."""
        with self._lock:
            if self._useless or self._stopped or (self._process is not None and self._process.poll() is None):
                return
            try:
                self._start(kind)
            except OSError as error:
                self._useless = f"no process for compiling could be started: {error}"

    def _ensure_started(self, kind: type[Backend]) -> None:
        self.start(kind)
        if self._stopped:
            raise StoppedError("the compile was stopped")
        if self._useless:
            raise CannotError(self._useless)
        if self._is_ready:
            return
        try:
            self._exchange()  # it says that it is ready
            self._is_ready = True
        except _DiedError as error:
            if self._stopped:
                raise StoppedError("the compile was stopped") from None
            self._useless = f"no process for compiling could be started: {error}"
            raise CannotError(self._useless) from None

    def _start(self, kind: type[Backend]) -> None:
        """With the lock held."""
        if not sys.executable:
            raise OSError("it is not known which Python this is")
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(self._compilers),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._pipe, theirs = Pipe()
        with theirs:
            self._is_ready = False
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tarry.runtime.compile.worker", str(theirs.fileno()), *_names(kind)],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # an interrupt from the keyboard is not for it; it is killed with its children
            )

    def _exchange(self, request: tuple[Any, ...] | None = None) -> tuple[str, Any, str]:
        """Send a request, if there is one, and wait for a reply."""
        assert self._pipe is not None
        try:
            if request is not None:
                self._pipe.send(request)
            reply: tuple[str, Any, str] = self._pipe.recv()
        except (OSError, EOFError) as error:
            raise _DiedError(self._last_words()) from error
        return reply

    def _last_words(self) -> str:
        assert self._process is not None
        assert self._errors is not None
        status = self._process.wait()
        words = b""
        with suppress(OSError, ValueError):
            self._errors.seek(0)
            words = self._errors.read().strip()
        last = words.splitlines()[-1].decode(errors="replace") if words else "it said nothing"
        return f"{'killed by ' + signal.Signals(-status).name if status < 0 else f'status {status}'}, {last}"

    def _kill(self) -> None:
        """With the lock held."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(limits.WORKER_KILL_SECONDS)  # reap it, so that `poll()` reports it dead


class Workers:
    """As many workers as the cores are enough for; a free one takes the next graph."""

    def __init__(self, count: int | None = None) -> None:
        cores = os.cpu_count() or 2
        count = count or max(1, min(limits.MAX_WORKERS, cores // limits.CORES_PER_WORKER))
        self._workers = [CompileProcess(max(1, (cores - 1) // count)) for _ in range(count)]
        self._free: queue.LifoQueue[CompileProcess] = queue.LifoQueue()  # the last one that worked has all imported
        self._fill()

    def _fill(self) -> None:
        for worker in reversed(self._workers):
            self._free.put(worker)

    def compile(self, backend: Backend, graph: Graph, symbols: Symbols | None = None) -> bytes:
        """As `CompileProcess.compile`, by a worker that is free."""
        worker = self._free.get()
        try:
            return worker.compile(backend, graph, symbols)
        finally:
            self._free.put(worker)

    def compile_all(
        self, backend: Backend, graphs: Sequence[Graph], symbols: Symbols | None = None
    ) -> list[bytes | CannotError]:
        """The artifacts of several graphs, at the same time if there are workers for them. Raises what the first raised
        that failed."""

        waiting = deque(enumerate(graphs))
        artifacts: dict[int, bytes | CannotError] = {}
        failures: list[BaseException] = []

        def work() -> None:
            while waiting and not failures:
                with suppress(IndexError):  # another thread has taken the last one
                    k, graph = waiting.popleft()
                    try:
                        artifacts[k] = self.compile(backend, graph, symbols)
                    except CannotError as error:
                        artifacts[k] = error
                    except BaseException as error:
                        failures.append(error)

        for (
            worker
        ) in self._workers:  # also those that the graphs at hand do not need: more will come, and imports take long
            worker.start(type(backend))
        # Not an executor of Python's: the end of the process would wait for it before the workers are killed.
        count = min(len(graphs), len(self._workers)) - 1
        threads = [threading.Thread(target=work, name="tarry-worker", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return [artifacts[k] for k in range(len(graphs))]

    def interrupt(self) -> None:
        """End what is being compiled."""
        for worker in self._workers:
            worker.interrupt()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()

    def after_fork(self) -> None:
        """In the child: the workers are the parent's."""
        self._free = queue.LifoQueue()
        for worker in self._workers:
            worker.after_fork()
        self._fill()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.pid is not None]


def _names(kind: type[Backend]) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _result(outcome: str, payload: Any, trace: str) -> bytes:
    if outcome == "done":
        return bytes(payload)
    if outcome == "cannot":
        raise CannotError(payload)
    if outcome == "unsupported":
        raise Unsupported(None, payload)
    error = BackendError(payload)
    error.add_note(trace)
    raise error
