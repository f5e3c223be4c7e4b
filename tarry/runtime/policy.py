"""What computes the batches of one structure: the reference path, until there is a program, if there is to be one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tarry.backends.base import Backend, Batch, Policy, PythonNumber, Step
from tarry.runtime.background import Job
from tarry.runtime.compiles import Compiles
from tarry.runtime.dispatch import apart
from tarry.runtime.places import Places
from tarry.runtime.steps import (
    MAX_VARIANTS,
    CompiledStep,
    InterpretedStep,
    Recording,
    ReferenceStep,
    Runnable,
    Variant,
)

REMEMBERED = 64
"""Sets of constants of which it is known that they have been seen."""

NEVER = ReferenceStep("nothing is to be compiled")
NEW = ReferenceStep("it is new")
_COMPILING = ReferenceStep("its program is being compiled")
_CROWDED = ReferenceStep("too many other programs are being compiled")


class GraphStep:
    """A step by policy.

    In the background, a graph is compiled when it comes a second time: many come once. So are sets of numbers that are
    constants to a program, unless it is plain that the next program will take them as inputs.
    """

    def __init__(
        self,
        compiles: Compiles,
        backend: Backend,
        instead: Callable[[Batch], Step | None] = lambda batch: None,
        made: Callable[[], None] = lambda: None,
        places: Places | None = None,
    ) -> None:
        """`instead` is asked before anything is compiled: there may be another step for it by now. `made` is told of a
        program. `places` count what is compiled for graphs that differ in length."""
        self._compiles = compiles
        self._backend = backend
        self._instead = instead
        self._made = made
        self._places = places or Places()
        self._step: Step | None = None
        self._job: Job[Step] | None = None
        self._seen = False
        self._variant_job: Job[Variant] | None = None
        self._variant_constants: Any = None  # those that it is for
        self._constants: dict[Any, bool] = {}  # those seen, and whether they cannot be compiled

    @property
    def ready(self) -> bool:
        """Whether there is a program."""
        return self._step is not None and not isinstance(self._step, ReferenceStep | InterpretedStep)

    def __call__(self, batch: Batch) -> None:
        policy = self._compiles.policy(self._backend)
        if policy == "never":
            NEVER(batch)
        elif self._step is not None:
            self._step(batch)
        else:
            self._without_program(batch, policy)(batch)

    def compile_now(self, batch: Batch) -> Step:
        """Compile, and wait for it."""
        step = self._instead(batch)
        if step is None:
            crowded = self._places.crowded(batch)
            if crowded is not None:
                return crowded
            self._places.compiled(batch)
            work = self._work(batch, background=False)
            step = apart(work)
        return self._take(step)

    def _work(self, batch: Batch, *, background: bool) -> Callable[[], Step]:
        """What makes the program of a batch. What it needs of the batch is taken now."""
        recording = Recording(batch)
        return lambda: self._compiles.step(self._backend, recording, self._another, background=background)

    def _comes_again(self) -> bool:
        """Whether to compile: it was seen before."""
        seen, self._seen = self._seen, True
        return seen

    def _without_program(self, batch: Batch, policy: Policy) -> Step:
        if self._job is None:
            instead = self._instead(batch)
            if instead is not None:
                return self._take(instead)
            self._compiles.refuse_new(batch)
            if policy == "wait":
                return self.compile_now(batch)
            if not self._comes_again():
                return NEW
            if self._compiles.crowded:
                return _CROWDED
            crowded = self._places.crowded(batch)
            if crowded is not None:
                return crowded
            self._places.compiled(batch)
            self._job = self._compiles.submit(self._work(batch, background=True))
            return _COMPILING
        if policy == "wait":
            self._job.wait()
        if not self._job.done:
            return _COMPILING
        job, self._job = self._job, None
        if job.result is not None:
            return self._take(job.result)
        if job.stopped:
            return NEW
        reason = _why_failed(job)
        step = self._take(ReferenceStep(reason))
        _report(reason)
        return step

    def _take(self, step: Step) -> Step:
        self._step = step
        if isinstance(step, CompiledStep):
            self._made()
        if isinstance(step, InterpretedStep):
            warnings.warn(f"tarry: {step.reason}. It runs on the reference path.", stacklevel=2)
        return step

    # ---- numbers that are constants to a program, and have changed

    def _another(self, step: CompiledStep, batch: Batch, numbers: list[PythonNumber]) -> Runnable:
        """What to run for numbers that no program of a step was compiled for."""
        policy = self._compiles.policy(self._backend)
        if self._variant_job is not None:
            if policy == "wait":
                self._variant_job.wait()
            if not self._variant_job.done:
                return _COMPILING
            self._add_variant(step, self._variant_job)
            found = step.find(numbers)
            if found is not None:
                return found
        reason = step.why(numbers)
        if step.is_full:
            return InterpretedStep(f"{reason}, and {MAX_VARIANTS} programs were compiled for other values already")
        sure = step.vary(numbers)
        constants = step.constants(numbers)
        if self._constants.get(constants):
            return ReferenceStep("compiling it has failed before")
        self._compiles.forbid.check(lambda: reason)
        if policy == "wait":
            recording = Recording(batch)
            return step.add(
                apart(lambda: self._compiles.variant(self._backend, step, recording, reason, background=False))
            )
        if not sure and constants not in self._constants:
            if len(self._constants) >= REMEMBERED:
                self._constants.clear()
            self._constants[constants] = False
            return NEW
        if self._compiles.crowded:
            return _CROWDED
        recording = Recording(batch)
        self._variant_constants = constants
        self._variant_job = self._compiles.submit(
            lambda: self._compiles.variant(self._backend, step, recording, reason, background=True)
        )
        return _COMPILING

    def _add_variant(self, step: CompiledStep, job: Job[Variant]) -> None:
        self._variant_job = None
        if job.result is not None:
            step.add(job.result)
        elif not job.stopped:
            self._constants[self._variant_constants] = True
            _report(_why_failed(job))


def _why_failed(job: Job[Any]) -> str:
    message = (str(job.error).strip().splitlines() or [repr(job.error)])[0]
    notes = [note.partition(";")[0] for note in getattr(job.error, "__notes__", ()) if note.startswith("while")]
    return f"compiling in the background failed: {message}{''.join(f' ({note})' for note in notes)}"


def _report(reason: str) -> None:
    """Say what came of a compile in the background that failed."""
    warnings.warn(f"tarry: {reason}. It goes on on the reference path.", stacklevel=2)
