"""Which program computes a new batch: one for its very sizes, or one for all sizes of its family (see `varying`)."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from tarry.backends.base import Backend, Step
from tarry.config import config
from tarry.errors import Unsupported
from tarry.ir.sizes import Symbols
from tarry.runtime.patience import PatientStep
from tarry.runtime.steps import InterpretedStep
from tarry.runtime.symbolic import FamilyStep, SymbolicStep
from tarry.runtime.varying import MAX_STATIC, Families, Family

logger = logging.getLogger("tarry")
SIZE_PATIENCE = 32
"""How often a step whose sizes vary runs on the reference path before it is compiled, where nobody chose the backend: a
short text is generated before a compiler could have started."""


class Compiler(Protocol):
    """What the runtime does for a new step."""

    def compile_static(self, backend: Backend, batch: Any) -> Step: ...
    def compile_symbolic(
        self, backend: Backend, batch: Any, family: Family, symbols: Symbols, reason: str
    ) -> SymbolicStep: ...
    def keep(self, batch: Any, step: Step) -> None: ...
    def describe(self, batch: Any) -> str: ...


class DynamicSteps:
    """The steps of families. `find` is asked for every batch for which there is no program of its very sizes; then
    `step` or `take_any` is, if nothing was found."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._families = Families()

    def clear(self) -> None:
        """Forget all steps."""
        self._families.clear()

    def find(self, batch: Any) -> Step | None:
        """The program with symbolic sizes for a batch, if there is one."""
        return self._families.find(batch)

    def take_any(self, batch: Any, step: Step) -> bool:
        """A step that computes a batch of any sizes: whether it is kept for its family from now on."""
        family, varies = self._families.note(batch)
        if family is not None and varies:
            family.step = lambda batch, symbols: step(batch)
        return varies

    def step(self, backend: Backend, batch: Any, patience: int) -> Step:
        """A step for a new batch. With `patience`, it runs on the reference path that often before it is compiled."""
        family, varies = self._families.note(batch)
        if family is not None and varies and backend.capabilities.symbolic_sizes and config.symbolic_sizes:
            return self._symbolic(backend, batch, family, patience)
        return self._static(backend, batch, family, patience)

    def _static(
        self, backend: Backend, batch: Any, family: Family | None, patience: int, *, refused: bool = False
    ) -> Step:
        """The step for a batch and others of its sizes. `refused`: its family's program is not right for them."""

        def make(later: Any) -> Step:
            if family is not None:
                covered = None if refused else self.find(later)  # by now, perhaps
                if covered is not None:
                    return covered
                family.static += 1
                if family.static > MAX_STATIC:
                    return self._too_many(family, later)
            return self._compiler.compile_static(backend, later)

        step = PatientStep(make, patience) if patience else make(batch)
        self._compiler.keep(batch, step)
        return step

    def _too_many(self, family: Family, batch: Any) -> Step:
        """What takes a batch that is not compiled any more; it is said once for each family."""
        what = self._compiler.describe(batch)
        reason = f"{what} was compiled for {MAX_STATIC} different sizes; others run on the reference path"
        if family.static == MAX_STATIC + 1:
            logger.warning("%s", reason)
        return InterpretedStep(reason)

    def _symbolic(self, backend: Backend, batch: Any, family: Family, patience: int) -> Step:
        """The step for a batch and others of its family."""

        def make(later: Any, symbols: Symbols) -> SymbolicStep | None:
            reason = family.describe(later.raw(), symbols)
            try:
                step = self._compiler.compile_symbolic(backend, later, family, symbols, reason)
            except Unsupported as error:
                logger.info("%s; but this step is not compiled for all sizes: %s", reason, error.reason)
                return None
            logger.warning("%s: the step was compiled once more, for any such size", reason)
            return step

        def otherwise(later: Any) -> Step:
            return self._static(backend, later, family, patience, refused=True)

        step = FamilyStep(family, make, otherwise, SIZE_PATIENCE * patience)
        symbols = self._families.symbols(family)
        assert symbols is not None  # the template was made from this batch
        family.step = step
        return lambda batch: step(batch, symbols)
