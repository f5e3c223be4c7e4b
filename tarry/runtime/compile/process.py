"""Compiling in another process (`worker.py`): started when it is needed, killed when this one ends.

Only the background's thread (`jobs.py`) asks, so there is one request at a time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
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
    """The worker, if there is one."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None  # to the process
        self._errors: IO[bytes] | None = None
        self._busy = False
        self._stopped = False
        self._useless = ""  # why no worker can be started

    def compile(self, backend: Backend, graphs: Sequence[Graph], symbols: Symbols | None = None) -> list[bytes]:
        """The artifacts of the programs; of graphs whose sizes vary, `symbols` are those at hand. Raises CannotError,
        StoppedError, or what the compiler raised."""
        recipe = backend.recipe()
        if recipe is None:
            raise CannotError(f"backend {backend.name!r} has no recipe")
        kind = type(backend)
        request = (kind.__module__, kind.__qualname__, recipe, [to_text(graph) for graph in graphs], symbols)
        with self._lock:
            self._busy, self._stopped = True, False
        try:
            return self._ask(request)
        finally:
            with self._lock:
                self._busy = False

    def _ask(self, request: tuple[Any, ...]) -> list[bytes]:
        how = ""
        for _ in range(limits.WORKER_ATTEMPTS):
            self._ensure_started()
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

    def _ensure_started(self) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            if self._stopped:
                raise StoppedError("the compile was stopped")
        if self._useless:
            raise CannotError(self._useless)
        try:
            self._start()
            self._exchange()  # it says that it is ready
        except (OSError, _DiedError) as error:
            if self._stopped:
                raise StoppedError("the compile was stopped") from None
            self._useless = f"no process for compiling could be started: {error}"
            raise CannotError(self._useless) from None

    def _start(self) -> None:
        if not sys.executable:
            raise OSError("it is not known which Python this is")
        spare = max(1, (os.cpu_count() or 2) - 1)
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(spare),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._pipe, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tarry.runtime.compile.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # an interrupt from the keyboard is not for it; it is killed with its children
            )
        with self._lock:
            self._process = process
            if self._stopped:
                self._kill()

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


def _result(outcome: str, payload: Any, trace: str) -> list[bytes]:
    if outcome == "done":
        return list(payload)
    if outcome == "cannot":
        raise CannotError(payload)
    if outcome == "unsupported":
        raise Unsupported(None, payload)
    error = BackendError(payload)
    error.add_note(trace)
    raise error
