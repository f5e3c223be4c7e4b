"""The contract between the runtime and a backend.

A backend compiles a `Program` (one recorded step: its graph in any stage, its key) into a `Computation`, which the
runtime calls with a `Batch` each time the same graph comes round. The reference backend needs no graph at all; those
that compile ask for `program.graph()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tarry.ir.graph import Graph


class Batch(Protocol):
    """What is pending at one moment (csrc/batch.h), to be computed and committed exactly once."""

    @property
    def key(self) -> tuple[int, int]: ...
    @property
    def num_operations(self) -> int: ...
    @property
    def num_outputs(self) -> int: ...
    def inputs(self) -> list[Any]: ...
    def numbers(self) -> list[Any]: ...
    def raw(self) -> dict[str, Any]: ...
    def interpret(self, interruptible: bool) -> None: ...
    def commit(self, outputs: list[Any]) -> None: ...


class Computation(Protocol):
    """A compiled program: computes a batch of its structure and commits the results."""

    def __call__(self, batch: Batch) -> None: ...


@dataclass(frozen=True)
class Program:
    """What a backend is given to compile."""

    key: tuple[int, int]
    num_operations: int
    raw: Callable[[], dict[str, Any]]

    def graph(self, stage: str = "optimized") -> Graph:
        """The step as typed IR: "recorded" as it was, or "optimized" (functional, clean views, no dead code)."""
        from tarry.ir.build import from_raw
        from tarry.passes.pipeline import run

        return run(from_raw(self.raw()), stage)


class Backend:
    """Subclass it, give it a `name`, and write `compile`. Its tensors live on `device` ("cpu", "cuda:0")."""

    name: str = ""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def setup(self) -> None:
        """Called when the backend becomes the current one."""

    def teardown(self) -> None:
        """Called when another backend replaces it, and at exit. All its tensors are materialised by then."""

    def compile(self, program: Program) -> Computation:
        """Make the program that computes batches of this structure."""
        raise NotImplementedError(f"backend {self.name or type(self).__name__!r} does not define compile(program)")

    def synchronize(self) -> None:
        """Wait for what is in flight on the real device."""

    def __repr__(self) -> str:
        return f"<backend {self.name!r} on {self.device}>"
