"""The runtime: from a request for values to values.

A request (an `.item()`, a copy to the host, `optimizer.step()`, `mark_step()`, the node cap) computes *everything* that
is pending, in one batch, so that ten `.item()` calls in a row run one program. Requests of several threads are served
one at a time; recording goes on meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from tarry import events
from tarry.backends import registry
from tarry.backends.base import Backend, Computation, Program
from tarry.config import config
from tarry.errors import BackendError, FallbackError, TarryError
from tarry.runtime.cache import ProgramCache
from tarry.runtime.closures import StepClosures


class Runtime:
    """The state of the runtime: the backend, its compiled programs, and the closures that wait for a step's end."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self._lock = threading.RLock()
        self._cache = ProgramCache()
        self._closures = StepClosures()
        self._backend: Backend | None = None
        self._in_flight = False

    # ---- the backend

    @property
    def backend(self) -> Backend:
        """The current backend; TARRY_BACKEND (default: eager) on first use."""
        if self._backend is None:
            with self._lock:
                if self._backend is None:
                    self.set_backend(os.environ.get("TARRY_BACKEND", "eager"), os.environ.get("TARRY_DEVICE"))
        assert self._backend is not None
        return self._backend

    def set_backend(self, backend: str | Backend, device: str | None = None) -> None:
        """Change the backend. What is pending is computed by the old one first; live tensors move to the new device."""
        chosen = _instance(backend, device)
        with self._lock:
            if self._backend is not None:
                try:
                    self.sync("set_backend")
                except Exception as error:  # the new backend computes what the old one could not
                    events.emit("error", stage="set_backend", backend=self._backend.name, error=repr(error))
                self._backend.teardown()
            chosen.setup()
            self._cache.clear()
            self._backend = chosen
            self._native.set_real_device(chosen.device)

    def close(self) -> None:
        """The process ends: closures finish, what is pending is dropped, the backend torn down."""
        self._closures.finish()
        if self._backend is not None:
            self._backend.teardown()

    # ---- syncing

    def sync(self, reason: str, device: int = 0) -> None:
        """Compute everything that is pending on a device."""
        with self._alone():
            backend = self.backend
            batch = self._native.collect(device)
            if batch is not None:
                start = perf_counter()
                self._in_flight = True
                try:
                    with _profiled("tarry::step"):
                        computation = self._cache.find(batch)
                        if computation is None:
                            computation = self._compile(backend, batch)
                        else:
                            events.emit("cache_hit", key=batch.key)
                        self._execute(computation, batch)
                finally:
                    self._in_flight = False
                events.emit("sync", reason=reason, operations=batch.num_operations, seconds=perf_counter() - start)
        self._closures.run()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for a step that another thread runs; a step of this thread's own cannot be waited for."""
        with self._lock:
            if self._in_flight:
                raise TarryError(
                    "a value or a graph was asked for in the middle of a step, by code that the step itself runs (an "
                    "event subscriber, a signal handler, a kernel written in Python). Note what is needed there, and "
                    "read it when the step is done."
                )
            yield

    def peek(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """The raw graph behind some tensors."""
        with self._alone():
            raw: dict[str, Any] = self._native.peek(tensors).raw()
            return raw

    def _compile(self, backend: Backend, batch: Any) -> Computation:
        start = perf_counter()
        with _profiled("tarry::compile"):
            try:
                computation = backend.compile(Program(batch.key, batch.num_operations, batch.raw))
            except Exception as error:
                events.emit("error", stage="compile", backend=backend.name, error=repr(error))
                error.add_note(f"while backend {backend.name!r} compiled {_describe(batch)}; all is still pending")
                raise
        self._cache.keep(batch, computation, config.max_cached_programs)
        seconds = perf_counter() - start
        events.emit(
            "compile", backend=backend.name, key=batch.key, operations=batch.num_operations, seconds=seconds
        )
        return computation

    def _execute(self, computation: Computation, batch: Any) -> None:
        start = perf_counter()
        with _profiled("tarry::execute"):
            try:
                computation(batch)
            except BaseException as error:
                events.emit("error", stage="execute", backend=self.backend.name, error=repr(error))
                raise
        events.emit("execute", seconds=perf_counter() - start)

    def materialise(self, tensors: Iterable[torch.Tensor]) -> None:
        """Compute what is pending if any of these tensors is; all that is pending if none is given."""
        chosen = list(tensors)
        for tensor in chosen:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"tarry.sync takes tensors, not {type(tensor).__name__}")
        if not chosen:
            self.sync("sync")
        for tensor in chosen:
            if tensor.device.type == "tarry":
                self._native.materialise(tensor)

    def wait(self) -> None:
        """Wait for what is in flight, step closures among it."""
        self.backend.synchronize()
        self._closures.wait()

    # ---- step closures

    def add_step_closure(self, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> None:
        """Have `function(*tensors)` called, with host copies, once the step that computes them is done."""
        self._closures.add(function, tensors)

    # ---- callbacks of the native part

    def on_sync(self, device: int, reason: str) -> None:
        """A value is needed (called from any thread, with the GIL)."""
        self.sync(reason, device)

    def on_fallback(self, op: str, reason: str, file: str, line: int) -> None:
        """An operator is about to run eagerly."""
        where = f"{file}:{line}" if file else "an unknown line"
        if config.fallback == "error":
            raise FallbackError(
                f"{op} has to run eagerly because {reason} (at {where}), and tarry.config.fallback is 'error'. "
                f"Avoid it there, or set tarry.config.fallback = 'allow'."
            )
        events.emit("fallback", op=op, reason=reason, file=file, line=line)


_UNPROFILED: AbstractContextManager[Any] = nullcontext()


def _profiled(name: str) -> AbstractContextManager[Any]:
    """A range that torch.profiler shows. Entering one costs microseconds, so only while a profiler looks."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else _UNPROFILED


def _describe(batch: Any) -> str:
    """A step, by its size and the lines of the program that it spans."""
    lines = [f"{node['file']}:{node['line']}" for node in batch.raw()["nodes"] if node["file"]]
    where = f", recorded from {lines[0]} to {lines[-1]}" if lines else ""
    return f"a step of {batch.num_operations} operators{where}"


def _instance(backend: str | Backend, device: str | None) -> Backend:
    if isinstance(backend, str):
        factory = registry.find(backend)
        made = factory() if device is None else factory(device=device)
        if not isinstance(made, Backend):
            raise BackendError(f"backend {backend!r}: its factory gave {made!r}, which is not a tarry.Backend")
    elif isinstance(backend, Backend):
        made = backend
        if device is not None:
            made.device = device
    else:
        raise BackendError(f"tarry.set_backend takes a name or a tarry.Backend instance, not {backend!r}")
    real = torch.device(made.device)
    if real.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"backend {made.name!r}: there is no CUDA device here; use device='cpu'")
    return made
