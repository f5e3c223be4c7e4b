"""The verdict on a run: a few numbers, whether it was warm, and what to change first. A pure function."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tarry.reports.costs import Cost
from tarry.reports.reading import Run
from tarry.reports.steps import Step, Timeline

WORTH = 0.02
"""What part of the run a line must have cost to be worth advice."""
RECENT = 0.2
"""The part of the steps, counted from the end, that decides whether a run was warm."""


@dataclass(frozen=True)
class Advice:
    """One thing to change. `seconds` is about what it would save."""

    seconds: float
    title: str
    remedy: str
    place: str = ""
    library: str = ""
    group: str = ""


@dataclass(frozen=True)
class Verdict:
    """What stands on top of the page."""

    seconds: float
    steps: int
    compiled_steps: int
    lost: dict[str, float]
    """Seconds by what they were lost to: compiles, reads, fallbacks."""
    background: float
    """Seconds of compiling beside the program."""
    state: str
    state_reason: str
    before: float | None
    after: float | None
    first: float | None
    advice: list[Advice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verdict(run: Run, made: Timeline, dear: Sequence[Cost]) -> Verdict:
    """The verdict on a run."""
    steps = made.steps
    later = steps[1:]  # the first has the start of everything in it
    without = [step.seconds for step in later if not step.compiled and not step.compile]
    by_program = [step.seconds for step in later if step.compiled and not step.compile]
    state, reason = _state(run, steps)
    return Verdict(
        seconds=run.seconds,
        steps=len(steps),
        compiled_steps=sum(step.compiled for step in steps),
        lost={group: sum(cost.awaited for cost in dear if cost.group == group) for group in _LOSSES},
        background=sum(cost.seconds - cost.awaited for cost in dear if cost.group == "compiles"),
        state=state,
        state_reason=reason,
        before=statistics.median(without) if without else None,
        after=statistics.median(by_program) if by_program else None,
        first=steps[0].seconds if steps else None,
        advice=sorted(_advice(run, steps, dear), key=lambda advice: -advice.seconds),
        notes=list(_notes(run, made)),
    )


_LOSSES = ("compiles", "reads", "fallbacks")


def _state(run: Run, steps: Sequence[Step]) -> tuple[str, str]:
    """Whether programs served the last steps without anything being compiled any more."""
    if not steps:
        return "empty", "no step was computed while events were recorded"
    recent = steps[-max(1, int(len(steps) * RECENT)) :]
    compiles = [e for e in run.events if e["kind"] == "compile" and e["t"] > recent[0].start]
    compiled = sum(step.compiled for step in recent)
    share = f"{compiled} of the last {len(recent)} steps ran by programs"
    if not any(step.compiled for step in steps):
        backend = "" if run.end is None else run.end["backend"]
        if backend == "eager":
            return "reference", "the backend 'eager' compiles nothing: operators run one by one"
        return "cold", "no step ran by a program"
    if compiles and compiles[-1].get("operations", 0) > 1:
        graphs = "1 graph was" if len(compiles) == 1 else f"{len(compiles)} graphs were"
        return "cold", f"{share}, and {graphs} compiled meanwhile"
    if compiled * 2 < len(recent):
        return "cold", share
    return "warm", f"{share}, and nothing was compiled meanwhile"


def _advice(run: Run, steps: Sequence[Step], dear: Sequence[Cost]) -> Iterator[Advice]:
    matters = WORTH * run.seconds
    for cost in dear:
        each = f"{cost.count:,} x {duration(cost.seconds / cost.count)}"
        place = {"place": cost.place, "library": cost.library, "group": cost.group}
        match cost.group:
            case "reads" if cost.seconds > matters and cost.count > 1:
                title = f"{cost.what} waits for a value ({each})"
                yield Advice(cost.seconds, title, cost.remedy or _READ, **place)
            case "fallbacks" if cost.seconds > matters:
                title = f"{cost.what} runs by itself ({each}): {cost.reason}"
                yield Advice(
                    cost.seconds, title, cost.remedy or "use an operator whose result has a known shape", **place
                )
            case "compiles" if cost.again and cost.awaited > matters:
                yield Advice(cost.awaited, f"compiled again ({each}): {cost.reason}", cost.remedy or _SAME, **place)
            case "failures":
                yield Advice(cost.seconds, f"{cost.kind}: {cost.what}", cost.remedy or "see Events", **place)
    first = [cost for cost in dear if cost.group == "compiles" and not cost.again]
    seconds = sum(cost.awaited for cost in first)
    if seconds > max(matters, 1.0):
        title = f"steps waited {seconds:.1f} s for first compiles"
        yield Advice(seconds, title, _FIRST, place=first[0].place, group="compiles")
    yield from _without_programs(steps, dear)


def _without_programs(steps: Sequence[Step], dear: Sequence[Cost]) -> Iterator[Advice]:
    """Why steps ran on the reference path."""
    waiting = [cost for cost in dear if cost.kind == "reference" and cost.reason]
    if steps and waiting and not any(step.compiled for step in steps):
        most = max(waiting, key=lambda cost: cost.count)
        yield Advice(0.0, f"no step ran by a program: {most.reason}", _WAIT, most.place, group="reference path")
    refused = [cost for cost in dear if cost.kind == "interpreted"]
    if refused and steps:
        slow = sum(step.reference for step in steps)
        yield Advice(
            slow, f"not compiled: {refused[0].reason}", refused[0].remedy, refused[0].place, group="reference path"
        )


_READ = "read it every tenth step, or hand it to tarry.add_step_closure"
_SAME = "keep shapes and numbers alike from step to step: DataLoader(drop_last=True), padding"
_WAIT = (
    "--compile wait, or tarry.set_backend(..., compile='wait'), waits for it; programs stay on disk for the next run"
)
_FIRST = "--compile background goes on meanwhile; programs stay on disk, so that the next run has them at once"


def duration(seconds: float) -> str:
    """A time with a unit that suits it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _notes(run: Run, made: Timeline) -> Iterator[str]:
    """What the page does not show."""
    earlier = run.header["before"]
    if earlier.get("sync"):
        yield f"recording began late: {earlier['sync']:,.0f} graphs were computed before. Call tarry.report() first."
    if run.end is None:
        yield "the file has no end: the process was killed, or is still running"
    elif run.end["dropped"]:
        yield f"{run.end['dropped']:,} events of the last steps were left out of the file"
    if made.left_out:
        yield f"the timeline leaves out {made.left_out:,} steps in the middle; all other figures include them"
    if run.skipped:
        yield f"{run.skipped} lines of {run.path} are damaged"
