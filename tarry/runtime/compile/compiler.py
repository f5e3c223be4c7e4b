"""Compiling, as all graphs share it: the policy, the thread and the process that compile, the graphs that are known."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch

from tarry import events
from tarry.backends.base import Backend, Batch, Policy, Recording
from tarry.config import config
from tarry.errors import BackendError, RecompileError, Unsupported
from tarry.ir.graph import GraphBuilder
from tarry.ir.layout import TensorType
from tarry.runtime import limits
from tarry.runtime.compile.computations import Build, note_family
from tarry.runtime.compile.device_guard import keep_device_guard
from tarry.runtime.compile.jobs import Background, Job
from tarry.runtime.compile.observe import Observer, show_begun, show_compiled
from tarry.runtime.compile.process import CompileProcess, StoppedError
from tarry.runtime.compile.reasons import KnownGraphs, NoRecompile
from tarry.runtime.entry import Reason
from tarry.runtime.sizes.families import SizedRecording
from tarry.runtime.sizes.variants import SizedVariants
from tarry.runtime.variants import Variant, Variants, unsupported

T = TypeVar("T")
log = logging.getLogger("tarry")


def _fault(backend: Backend, recording: Recording, error: Exception) -> None:
    """A backend has failed to compile something."""
    what = {"stage": "compile", "backend": backend.name, "error": repr(error), **recording.place}
    events.emit("error", **what)
    events.emit("backend_fault", reason=f"it failed to compile {recording.describe()}: {_first_line(error)}", **what)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


class Compiler:
    """Makes programs, on any thread, from what `Recording.take()` took; the engine decides when."""

    def __init__(self) -> None:
        self._process = CompileProcess()
        self._background = Background(self._process)
        self._known = KnownGraphs()
        self.no_recompile = NoRecompile()
        self.chosen: Policy | None = None
        self.observer: Observer | None = None
        """Is shown each graph that is compiled."""
        os.register_at_fork(after_in_child=self._after_fork)

    def policy(self, backend: Backend) -> Policy:
        """The one that was chosen with the backend, else the configured one, else the backend's own."""
        return self.chosen or config.compile or backend.compile_policy

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Have something compiled in the background."""
        return self._background.submit(work)

    def warm_up(self, backend: Backend) -> None:
        """Start the worker, and have it import all that compiling takes, before the first graph is there: that takes
        longer than many a graph. Not where a program would miss the processor that it takes."""
        if len(os.sched_getaffinity(0)) >= limits.WARM_UP_CORES and backend.recipe() is not None:
            builder = GraphBuilder()
            x = builder.input(TensorType.contiguous(torch.float32, (4,)))
            graph = builder.finish([builder.one("aten::neg", (x,), x.type)], [None])
            self.submit(lambda: self._process.compile(backend, [graph]))

    @property
    def queue_full(self) -> bool:
        """Whether so much waits to be compiled that more had better not."""
        return self._background.full

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled in the background; False if that took longer."""
        return self._background.wait(timeout)

    def forget(self) -> None:
        """The backend goes, and with it all programs."""
        self._background.forget()
        self._known.clear()

    def close(self) -> None:
        """The process ends."""
        self._background.close()
        self._process.close()

    def _after_fork(self) -> None:
        self._background.after_fork()
        self._process.after_fork()

    def recompile_error(self, batch: Batch) -> RecompileError:
        """What to raise for a graph that is new, inside `tarry.no_recompile()`."""
        recording = Recording(batch)
        return self.no_recompile.error(self._known.reason(recording) or f"{recording.describe()} is new")

    # ---- making programs

    def compile_graph(self, backend: Backend, recording: Recording, background: bool) -> Variants | Reason:
        """The programs of a graph at its own sizes."""
        with self._build(backend, recording, background) as build:
            build.reason = self._known.reason(recording)
            self._known.remember(recording)
            try:
                return Variants(backend, recording, build)
            except Unsupported as error:
                return unsupported(backend, error)

    def compile_sizes(self, backend: Backend, recording: SizedRecording, background: bool) -> SizedVariants | Reason:
        """The programs of a graph for several sizes, if the backend can make one."""
        with self._build(backend, recording, background) as build:
            build.reason = recording.why
            build.announced = True  # when it has come to something
            try:
                made = SizedVariants(backend, recording, build)
            except Unsupported as error:
                log.info("%s; but the step is not compiled for all sizes: %s", recording.why, error.reason)
                return Reason(error.reason)
            except StoppedError:
                raise
            except Exception as error:  # there is still a program for each size
                _fault(backend, recording, error)
                message = f"compiling for all sizes failed: {type(error).__name__}: {error}"
                log.warning("tarry: %s; each size is compiled by itself", message)
                return Reason(message)
            if build.compiled:
                build.announce(f"{recording.why}: once more, for any such size")
            note_family(backend, recording.outline)
            return made

    def compile_constants(
        self, backend: Backend, recording: Recording, background: bool, variants: Variants, reason: str
    ) -> Variant | Reason:
        """Another program of a graph some of whose constants have changed."""
        with self._build(backend, recording, background) as build:
            build.reason = reason
            return variants.compile(recording.numbers, build)

    @contextmanager
    def _build(self, backend: Backend, recording: Recording, background: bool) -> Iterator[Build]:
        start = perf_counter()
        keep_device_guard()
        build = Build(backend, recording, self._process if background else None, None if self.observer is None else {})
        if background:
            show_begun(self.observer, build)
        try:
            yield build
        except StoppedError:
            raise  # the program has no use any more
        except Exception as error:
            _fault(backend, recording, error)
            what = recording.describe()
            if isinstance(error, BackendError | NotImplementedError):
                error.add_note(f"while backend {backend.name!r} compiled {what}; all is still pending")
                raise
            raise BackendError(
                f"backend {backend.name!r} failed to compile {what}: {type(error).__name__}: {error}\n"
                f"All is still pending: tarry.set_backend('eager') computes it without this backend."
            ) from error
        if build.compiled or not build.loaded:
            seconds = perf_counter() - start
            events.emit("compile", key=recording.key, seconds=seconds, **build.described())
            if seconds > limits.SLOW_COMPILE_SECONDS:
                events.emit("slow_compile", seconds=seconds, **build.described())
        show_compiled(self.observer, build, perf_counter() - start, background)
