"""What computes steps whose sizes vary: the reference path, until there is a program with symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable

from tarry.backends.base import Backend, Batch, Step
from tarry.ir.sizes import Symbols
from tarry.runtime.compiles import Compiles
from tarry.runtime.policy import GraphStep
from tarry.runtime.steps import ReferenceStep
from tarry.runtime.symbolic import SizedRecording, SymbolicStep
from tarry.runtime.varying import Family

PATIENCE = 32
"""How often steps of a family run on the reference path before one is compiled in the background: a short text is
generated, and the last batch of an epoch computed, before a compiler could have been of use."""

_NEVER = ReferenceStep("nothing is to be compiled")


class FamilyStep(GraphStep):
    """The steps of a family (see `varying`) by policy. `otherwise` makes the step for sizes that no program with
    symbolic sizes is right for, or of which none could be made."""

    def __init__(
        self, compiles: Compiles, backend: Backend, family: Family, otherwise: Callable[[Batch], Step]
    ) -> None:
        super().__init__(compiles, backend)
        self._family = family
        self._otherwise = otherwise
        self._runs = PATIENCE
        self._symbols: Symbols = ()

    def run_at(self, batch: Batch, symbols: Symbols) -> None:
        """Compute a batch, given the values of the symbols."""
        policy = self._compiles.policy(self._backend)
        if policy == "never":
            _NEVER(batch)
            return
        self._symbols = symbols
        step = self._step or self._without_program(batch, policy)
        if self._step is None:
            step(batch)
        elif not isinstance(step, SymbolicStep) or not step.run_at(batch, symbols):
            self._otherwise(batch)(batch)

    def _work(self, batch: Batch, *, background: bool) -> Callable[[], Step]:
        recording = SizedRecording(batch, self._family, self._symbols)
        return lambda: self._compiles.sized_step(self._backend, recording, self._another, background=background)

    def _comes_again(self) -> bool:
        self._runs -= 1
        return self._runs < 0

    def _take(self, step: Step) -> Step:
        self._step = step
        if not isinstance(step, SymbolicStep):
            self._family.give_up()
        return step
