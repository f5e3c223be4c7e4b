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
from contextlib import suppress
from typing import IO, Any

from tarry.backends.base import Backend
from tarry.errors import BackendError, Unsupported
from tarry.ir.graph import Graph
from tarry.ir.sizes import Symbols
from tarry.ir.text import to_text
from tarry.runtime import limits
from tarry.runtime.compile.messages import receive, send
from tarry.store import pack, unpack


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
        self._errors: IO[bytes] | None = None
        self._busy = False
        self._stopped = False
        self._useless = ""  # why no worker can be started

    def compile(self, backend: Backend, graph: Graph, symbols: Symbols | None = None) -> bytes:
        """The artifact of the program; of a graph whose sizes vary, `symbols` are those of the graph at hand. Raises
        CannotError, StoppedError, or what the compiler raised."""
        recipe = backend.recipe()
        if recipe is None:
            raise CannotError(f"backend {backend.name!r} has no recipe")
        kind = type(backend)
        header = {"class": f"{kind.__module__}:{kind.__qualname__}", "recipe": recipe, "symbols": symbols}
        request = pack(header, [to_text(graph).encode()])
        with self._lock:
            self._busy, self._stopped = True, False
        try:
            return self._ask(backend, request)
        finally:
            with self._lock:
                self._busy = False

    def _ask(self, backend: Backend, request: bytes) -> bytes:
        how = ""
        for _ in range(limits.WORKER_ATTEMPTS):
            process = self._started()
            try:
                return _result(backend, self._exchange(process, request))
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
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process.returncode = 0  # the parent waits for it
        self._reset()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    # ---- its life

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._process
            if self._stopped:
                raise StoppedError("the compile was stopped")
        if self._useless:
            raise CannotError(self._useless)
        try:
            process = self._start()
            self._ready(process)
        except (OSError, _DiedError) as error:
            if self._stopped:
                raise StoppedError("the compile was stopped") from None
            self._useless = f"no process for compiling could be started: {error}"
            raise CannotError(self._useless) from None
        return process

    def _start(self) -> subprocess.Popen[bytes]:
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
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tarry.runtime.compile.worker"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard is not for it; and it is killed with its children
        )
        with self._lock:
            self._process = process
            if self._stopped:
                self._kill()
        return process

    def _ready(self, process: subprocess.Popen[bytes]) -> None:
        header, _ = unpack(self._receive(process))
        assert header["outcome"] == "ready"

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> bytes:
        assert process.stdin is not None
        try:
            send(process.stdin, request)
        except OSError as error:
            raise _DiedError(self._last_words(process)) from error
        return self._receive(process)

    def _receive(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        try:
            reply = receive(process.stdout)
        except OSError:
            reply = None
        if reply is None:
            raise _DiedError(self._last_words(process))
        return reply

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        status = process.wait()
        words = b""
        if self._errors is not None:
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


def _result(backend: Backend, reply: bytes) -> bytes:
    header, blobs = unpack(reply)
    outcome: Any = header["outcome"]
    if outcome == "done":
        return bytes(blobs[0])
    if outcome == "cannot":
        raise CannotError(header["reason"])
    if outcome == "unsupported":
        raise Unsupported(None, header["reason"])
    error = BackendError(header["reason"])
    error.add_note(bytes(blobs[0]).decode())
    raise error
