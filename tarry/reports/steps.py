"""What a run did when: its steps, and the spans of its timeline. Pure functions of a `Run`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tarry.reports.reading import Run, ordered

CATEGORIES = ("record", "reference", "execute", "compile", "wait", "read", "fallback", "collective")
RECORD, REFERENCE, EXECUTE, COMPILE, WAIT, READ, FALLBACK, COLLECTIVE = range(len(CATEGORIES))
ENDS = frozenset({"optimizer.step", "mark_step", "replay"})
"""Reasons of syncs that end a step of the program. A run without any has no other steps than its syncs."""
COMPILED = frozenset({"compiled", "native", "replayed"})
"""Paths on which a program computes a step."""
MAIN = 0
"""The main thread, which a recorder names first."""
MAX_STEPS = 20_000
"""Of longer runs, the timeline has the first and the last half as many."""


class Span(NamedTuple):
    """A time in which one thing was done."""

    start: float
    seconds: float
    category: int
    thread: int
    step: int
    label: str


@dataclass(slots=True)
class Step:
    """From one end of a step to the next. `seconds` is all of it, the program's own Python included."""

    start: float
    end: float = 0.0
    record: float = 0.0
    reference: float = 0.0
    execute: float = 0.0
    compile: float = 0.0
    wait: float = 0.0
    fallback: float = 0.0
    operations: int = 0
    syncs: int = 0
    by_program: int = 0
    """Operators that programs computed."""
    where: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def compiled(self) -> bool:
        return self.by_program * 2 > self.operations


@dataclass
class Timeline:
    """The steps of a run, and what each thread did when."""

    steps: list[Step] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    left_out: int = 0
    """Steps in the middle that have no spans."""


def timeline(run: Run) -> Timeline:
    """Steps and spans, in order of time."""
    events = list(ordered(run.events))
    ends = ENDS if any(e["kind"] == "sync" and e.get("reason") in ENDS for e in events) else None
    made = Timeline()
    step = Step(0.0)
    interpreted = False
    for event in events:
        kind = event["kind"]
        interpreted = interpreted or kind in ("reference", "interpreted")
        spans = list(_spans(event, len(made.steps), interpreted))
        made.spans.extend(spans)
        _count(step, event, spans)
        if kind != "sync":
            continue
        by_program = event["path"] in COMPILED if event.get("path") else not interpreted
        step.by_program += event.get("operations", 0) if by_program else 0
        interpreted = False
        if ends is None or event.get("reason") in ends:
            step.end = event["t"]
            step.where = where(event)
            made.steps.append(step)
            step = Step(event["t"])
    if made.steps:  # the first one begins when something is first recorded, not when the process does
        first = min((span.start for span in made.spans if span.step == 0), default=0.0)
        made.steps[0].start = max(0.0, first)
    _thin(made)
    return made


def _count(step: Step, event: dict[str, Any], spans: Iterable[Span]) -> None:
    for span in spans:
        name = CATEGORIES[span.category]
        if hasattr(step, name) and not (span.category == COMPILE and event.get("background")):
            setattr(step, name, getattr(step, name) + span.seconds)
    if event["kind"] == "sync":
        step.syncs += 1
        step.operations += event.get("operations", 0)


def _spans(event: dict[str, Any], step: int, interpreted: bool) -> Iterator[Span]:
    seconds = event.get("seconds", 0.0)
    end, thread = event["t"], event["thread"]
    if event["kind"] == "compile" and not event.get("background"):
        thread = MAIN  # which waits for it

    def span(start: float, length: float, category: int, label: str) -> Span:
        return Span(max(0.0, start), length, category, thread, step, label)

    match event["kind"]:
        case "sync":
            begin, recorded, waited = end - seconds, event.get("record_seconds", 0.0), event.get("wait_seconds", 0.0)
            label = f"{event.get('operations', 0)} operators, {event.get('reason', '')}"
            if recorded:
                yield span(event.get("start", begin - recorded), recorded, RECORD, label)
            if waited:
                yield span(begin, waited, WAIT, "the step before")
            executed = event.get("execute_seconds", 0.0)
            if executed:
                is_reference = event.get("path") in ("reference", "direct") or (not event.get("path") and interpreted)
                yield span(end - executed, executed, REFERENCE if is_reference else EXECUTE, label)
        case "compile":
            yield span(
                end - seconds, seconds, COMPILE, event.get("reason") or f"{event.get('operations', 0)} operators"
            )
        case "read":
            yield span(end - seconds, seconds, READ, f".{event.get('method', '')}() {where(event)}")
        case "fallback":
            yield span(end - seconds, seconds, FALLBACK, f"{event.get('op', '')} {where(event)}")
        case "collective":
            start, waited = event.get("start", end - seconds), event.get("wait_seconds", 0.0)
            label = f"{event.get('op', '')}, {event.get('bytes', 0):,} bytes, waited for {waited * 1e3:.1f} ms"
            yield span(start, end - start, COLLECTIVE, f"{label} {where(event)}")


def where(event: dict[str, Any]) -> str:
    """The user's line of an event, or nothing."""
    return f"{event['file']}:{event.get('line', 0)}" if event.get("file") else ""


def _thin(made: Timeline) -> None:
    """Leave out the spans in the middle of a long run."""
    half = MAX_STEPS // 2
    if len(made.steps) > MAX_STEPS:
        last = len(made.steps) - half
        made.left_out = last - half
        made.spans = [span for span in made.spans if span.step < half or span.step >= last]
