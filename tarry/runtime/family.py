"""What computes steps whose sizes vary: the reference path, until there is a program with symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from tarry.backends.base import Backend, Batch, Policy, Step
from tarry.ir.sizes import Symbols
from tarry.runtime.compiles import Compiles
from tarry.runtime.computations import MAX_RANGES, is_family_stored
from tarry.runtime.policy import NEVER, NEW, GraphStep
from tarry.runtime.symbolic import SizedRecording, SymbolicStep
from tarry.runtime.varying import Family

PATIENCE = 32
"""How often steps of a family run on the reference path before one is compiled in the background: a short text is
generated, and the last batch of an epoch computed, before a compiler could have been of use."""

SECONDS = 0.05
"""And for how long. To find out how sizes hang together, to note a step at several of them, and to load its program
takes the program's own thread some milliseconds, which a few tokens of a tiny model are not worth. For a program that
is stored, nothing else counts."""


class Otherwise(Protocol):
    """Makes the step for sizes that are not the family's: no template fits, or (`refused`) no program is right."""

    def __call__(self, batch: Batch, *, refused: bool) -> Step: ...


class FamilyStep(GraphStep):
    """The steps of a family (see `varying`) by policy. A compiler decides by the sizes at hand how it goes about a step
    (up to 4096 elements so, above otherwise), so there may be a few programs for different ranges."""

    def __init__(self, compiles: Compiles, backend: Backend, family: Family, otherwise: Otherwise) -> None:
        super().__init__(compiles, backend)
        self._family = family
        self._otherwise = otherwise
        self._runs = PATIENCE
        self._looked = self._stored = False  # whether there is a stored program
        self._symbols: Symbols = ()
        self._ranges: list[SymbolicStep] = []
        self._attempts = 0
        self._refusal: Step | None = None

    @property
    def ready(self) -> bool:
        return bool(self._ranges)

    def run_at(self, batch: Batch, symbols: Symbols) -> None:
        """Compute a batch, given the values of the symbols; none, if there was no template when it was looked for."""
        policy = self._compiles.policy(self._backend)
        if policy == "never":
            NEVER(batch)
            return
        if not symbols:
            if self._is_early(policy):
                self._compiles.refuse_new(batch)
                self._runs -= 1
                self._run_reference(NEW, batch)
                return
            settled = self._family.settle(batch)
            if settled is None:
                self._otherwise(batch, refused=False)(batch)
                return
            symbols = settled
        for step in self._ranges:
            if step.run_at(batch, symbols):
                return
        self._outside(batch, symbols, policy)

    def _is_early(self, policy: Policy) -> bool:
        """Whether it is too early to look for a template: nothing would be compiled yet."""
        return policy == "background" and self._family.template is None and self._family.seconds < SECONDS

    def _run_reference(self, step: Step, batch: Batch) -> None:
        start = perf_counter()
        step(batch)
        self._family.seconds += perf_counter() - start

    def _outside(self, batch: Batch, symbols: Symbols, policy: Policy) -> None:
        """Compute a batch of sizes that no program is right for yet."""
        if self._refusal is None and self._attempts < MAX_RANGES:
            self._symbols = symbols
            step = self._without_program(batch, policy)
            if isinstance(step, SymbolicStep):
                if step.run_at(batch, symbols):
                    return
            elif step is not self._refusal:
                self._run_reference(step, batch)
                return
        self._otherwise(batch, refused=True)(batch)

    def _work(self, batch: Batch, *, background: bool) -> Callable[[], Step]:
        recording = SizedRecording(batch, self._family, self._symbols)
        return lambda: self._compiles.sized_step(self._backend, recording, self._another, background=background)

    def _comes_again(self) -> bool:
        self._runs -= 1
        if self._family.seconds < SECONDS:
            return False
        if not self._looked:
            self._looked = True
            self._stored = is_family_stored(self._backend, self._family.outline.key)
        return self._stored or self._runs < 0

    def _take(self, step: Step) -> Step:
        self._attempts += 1
        if isinstance(step, SymbolicStep):
            self._ranges.append(step)
        else:
            self._refusal = step
            if not self._ranges:
                self._family.give_up()
        return step
