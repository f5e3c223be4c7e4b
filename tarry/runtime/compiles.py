"""When a graph is compiled, where, and what a step does until then: the policies "wait", "background" and "never"."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from torch.profiler import record_function

from tarry import events
from tarry.backends.base import Backend, Batch, Policy, Step
from tarry.config import config
from tarry.errors import BackendError, Unsupported
from tarry.runtime.background import Background, Job
from tarry.runtime.computations import Maker, note_family
from tarry.runtime.forbid import RecompileGuard
from tarry.runtime.remote import CompileProcess, StoppedError
from tarry.runtime.steps import (
    Another,
    CompiledStep,
    InterpretedStep,
    Recording,
    ReferenceStep,
    Variant,
    unsupported_message,
)
from tarry.runtime.symbolic import SizedRecording, SymbolicStep
from tarry.runtime.why import KnownGraphs, reasons

T = TypeVar("T")
log = logging.getLogger("tarry")


class Compiles:
    """What all steps share: the policy, the thread and the process that compile, the graphs that are known."""

    def __init__(self, guard: Callable[[], object]) -> None:
        self._guard = guard
        self._process = CompileProcess()
        self._background = Background(self._process.interrupt)
        self._known = KnownGraphs()
        self.forbid = RecompileGuard()
        self.chosen: Policy | None = None
        os.register_at_fork(after_in_child=self._after_fork)

    def policy(self, backend: Backend) -> Policy:
        """The one that was chosen with the backend, else the configured one, else the backend's own."""
        return self.chosen or config.compile or backend.compile_policy

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled in the background."""
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

    def refuse_new(self, batch: Batch) -> None:
        """Raise if no new program is allowed."""

        def why() -> str:
            recording = Recording(batch)
            return self._known.reason(recording.recorded) or f"{recording.describe()} is new"

        self.forbid.check(why)

    # ---- making programs

    def step(self, backend: Backend, recording: Recording, another: Another, *, background: bool) -> Step:
        """The compiled step of a recording."""

        def why() -> str:
            reason = self._known.reason(recording.recorded)
            self._known.remember(recording.recorded)
            return reason

        def work(make: Maker) -> Step:
            try:
                return CompiledStep(backend, recording, make, self._guard, another)
            except Unsupported as error:
                return InterpretedStep(unsupported_message(backend, error))

        return self._make(backend, recording, why, work, background)

    def sized_step(self, backend: Backend, recording: SizedRecording, another: Another, *, background: bool) -> Step:
        """The step of a recording for all its sizes, if the backend can make one."""

        def work(make: Maker) -> Step:
            try:
                step = SymbolicStep(backend, recording, make, self._guard, another)
            except Unsupported as error:
                log.info("%s; but the step is not compiled for all sizes: %s", recording.why, error.reason)
                return ReferenceStep(error.reason)
            except StoppedError:
                raise
            except Exception as error:  # there is still a program for each size
                events.emit("error", stage="compile", backend=backend.name, error=repr(error))
                message = f"compiling for all sizes failed: {type(error).__name__}: {error}"
                log.warning("tarry: %s; each size is compiled by itself", message)
                return ReferenceStep(message)
            if make.compiled:
                _say(f"{recording.why}: once more, for any such size", recording)
            note_family(backend, recording.outline)
            return step

        return self._make(backend, recording, lambda: recording.why, work, background, announce=False)

    def variant(
        self, backend: Backend, step: CompiledStep, recording: Recording, reason: str, *, background: bool
    ) -> Variant:
        """Another program for a step some of whose constants have changed."""

        def work(make: Maker) -> Variant:
            return step.compile(recording.numbers, make)

        return self._make(backend, recording, lambda: reason, work, background)

    def _make(
        self,
        backend: Backend,
        recording: Recording,
        why: Callable[[], str],
        work: Callable[[Maker], T],
        background: bool,
        announce: bool = True,
    ) -> T:
        """`announce`: say why before anything is compiled; else it is said by `work`, when it has come to something."""
        start = perf_counter()
        with record_function("tarry::compile"):
            try:
                reason = why()
                on_compile = (lambda: _say(reason, recording)) if announce else (lambda: None)
                make = Maker(backend, self._process if background else None, on_compile)
                made = work(make)
            except StoppedError:
                raise  # nobody is there to be told
            except Exception as error:
                events.emit("error", stage="compile", backend=backend.name, error=repr(error))
                if isinstance(error, BackendError | NotImplementedError):
                    what = recording.describe()
                    error.add_note(f"while backend {backend.name!r} compiled {what}; all is still pending")
                    raise
                raise _failure(backend, recording, error) from error
        if make.compiled or not make.loaded:
            events.emit(
                "compile",
                backend=backend.name,
                key=recording.key,
                operations=recording.num_operations,
                seconds=perf_counter() - start,
                reason=reason,
                background=background,
            )
        return made

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Have something compiled in the background."""
        return self._background.submit(work)

    @property
    def crowded(self) -> bool:
        """Whether so much waits to be compiled that more had better not."""
        return self._background.crowded


def _say(reason: str, recording: Recording) -> None:
    reasons.say(reason, recording.lines, recording.num_operations)


def _failure(backend: Backend, recording: Recording, error: Exception) -> BackendError:
    return BackendError(
        f"backend {backend.name!r} failed to compile {recording.describe()}: {type(error).__name__}: {error}\n"
        f"All is still pending: tarry.set_backend('eager') computes it without this backend."
    )
