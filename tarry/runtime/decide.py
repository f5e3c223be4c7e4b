"""What to do with a batch: a pure function of what is known of its graph. `engine.py` carries the decision out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from tarry.backends.base import Backend, Policy
from tarry.runtime import limits
from tarry.runtime.entry import Entry, Reason, State

SMALL = Reason("it is small: no program would be worth its making")
NEVER = Reason("nothing is to be compiled")
NEW = Reason("it is new")
COMPILING = Reason("its program is being compiled")
PARTIAL = Reason("its first operators ran directly")
SWITCHED = Reason("a global switch of PyTorch's was set otherwise when it was recorded")
QUEUE_FULL = Reason("too many other programs are being compiled")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the decision about a graph without a program depends on, besides its entry and the policy."""

    no_recompile: bool = False
    """The process is inside `tarry.no_recompile()`."""
    over_budget: Reason | None = None
    """Why no more is compiled of its kind, or right now."""
    certain: bool = False
    """The program is certain to be used again, so that it is worth compiling before the graph comes a second time."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run the program."""


@dataclass(frozen=True, slots=True)
class Interpret:
    """Run the batch on the reference path."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class CompileNow:
    """Have a program before the batch runs: wait for the job that makes it, or compile here."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Have a program made in the background, and run the batch on the reference path meanwhile."""


@dataclass(frozen=True, slots=True)
class RefuseRecompile:
    """Raise `tarry.RecompileError`: it would take a new program."""


Decision: TypeAlias = Run | Interpret | CompileNow | Submit | RefuseRecompile
NO_FACTS = Facts()
_RUN = Run()  # one object: this is the decision of nearly every step


def small_step(backend: Backend, policy: Policy) -> tuple[int, int]:
    """Up to how many operators, and bytes of values, a step is computed by the reference path whatever is known of it.
    The native part does so without Python (csrc/execute/serve.h). (0, 0): none is."""
    if policy == "wait" or backend.capabilities.opaque_data or type(backend).prepare is not Backend.prepare:
        return 0, 0  # a program is asked for, the data are the backend's own, or it takes steps as they were recorded
    if policy == "never":
        return limits.ALL, limits.ALL
    return limits.SMALL_OPERATIONS, limits.SMALL_BYTES


def decide(entry: Entry[Any], facts: Facts, policy: Policy) -> Decision:
    """What to do with a batch of this entry."""
    if entry.prepared:
        return _RUN
    if policy == "never":
        return Interpret(NEVER)
    if entry.state is State.READY:
        return _RUN
    if entry.state is State.REFUSED:
        assert entry.reason is not None
        return Interpret(entry.reason)
    if entry.state is State.COMPILING:
        return CompileNow() if policy == "wait" else Interpret(COMPILING)
    if facts.no_recompile:
        return RefuseRecompile()
    if policy == "background" and entry.state is State.NEW and not facts.certain:
        return Interpret(NEW)
    if facts.over_budget is not None:
        return Interpret(facts.over_budget)
    return CompileNow() if policy == "wait" else Submit()
