"""The summary at the end of `tarry run`: about ten lines, from what was watched. Pure functions of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from rich.text import Text

from tarry.cli.watch import Cost, Place, Watch
from tarry.events.text import duration, place, short, short_line

SHOWN = 3
"""Reads and fallbacks that are named, the most expensive first."""
REFERENCE = "eager"
"""The backend that compiles nothing."""
WORTH = 0.03
"""What part of the time of all steps a line must have cost to be worth advice."""


def summary(watch: Watch, name: str, source: str, backend: str, device: str) -> Text:
    """What happened, and what to do about it."""
    if not watch.syncs:
        return Text(f"tarry run: {name}: nothing was recorded. {_nothing(source)}")
    rows = [("", f"{name} on tarry, backend {backend} on {device}"), *_rows(watch, backend)]
    rows += [("do" if k == 0 else "", advice) for k, advice in enumerate(_advice(watch))]
    text = Text()
    for k, (label, content) in enumerate(rows):
        text.append(f"tarry run: {content}" if k == 0 else f"\n  {label:<10} ", style="bold" if k == 0 else "cyan")
        if k:
            text.append(content)
    return text


def _nothing(source: str) -> str:
    if source == "cuda":
        return 'The script put no tensor on "cuda"; if it was written for the CPU: tarry run --from cpu'
    return "The script made no tensor that an operator was given"


def _rows(watch: Watch, backend: str) -> Iterator[tuple[str, str]]:
    steps = len(watch.steps)
    compiled = sum(step.compiled for step in watch.steps)
    if steps:
        share = "" if backend == REFERENCE else f", {compiled} of them by programs ({compiled / steps:.0%})"
        yield "steps", f"{steps}{share}; {watch.syncs} graphs computed"
        yield "time", _times(watch)
    else:
        yield "graphs", f"{watch.syncs} computed; no optimizer.step()"
    yield "compiles", "none: operators run one by one" if backend == REFERENCE else _compiles(watch)
    yield from _costs("reads", watch.reads, "none: nothing waited for a value")
    yield from _costs("fallbacks", watch.fallbacks, "none: every operator was recorded")


def _times(watch: Watch) -> str:
    later = watch.steps[1:]  # the first one has the start of everything in it
    before = [step.seconds for step in later if not step.compiled]
    after = [step.seconds for step in later if step.compiled]
    parts = []
    if before:
        parts.append(f"{duration(statistics.median(before))} a step without a program")
    if after:
        parts.append(f"{duration(statistics.median(after))} {'with one' if before else 'a step'}")
    ratio = f" ({statistics.median(before) / statistics.median(after):.1f} times as fast)" if before and after else ""
    return (", ".join(parts) or "-") + ratio + f"; the first was over after {duration(watch.steps[0].seconds)}"


def _compiles(watch: Watch) -> str:
    stored = f"{watch.stored} programs from disk" if watch.stored else ""
    if not watch.compiles:
        return stored or "none"
    again = [fields for fields in watch.compiles if fields["again"]]
    seconds = sum(fields["seconds"] for fields in watch.compiles)
    largest = max(watch.compiles, key=lambda fields: fields["operations"])
    parts = [
        f"{len(watch.compiles)} in {duration(seconds)}, {len(again)} of them again",
        f"the largest has {largest['operations']} operators ({place(largest)})",
        *sorted({fields["reason"] for fields in again})[:2],
        *([stored] if stored else []),
    ]
    return "; ".join(parts)


def _costs(label: str, table: Mapping[Place, Cost], none: str) -> Iterator[tuple[str, str]]:
    if not table:
        yield label, none
    for k, (at, cost) in enumerate(worst(table)):
        library = f", by {short_line(cost.library)}" if cost.library else ""
        where = f"{short(at.file)}:{at.line}" if at.file else "an unknown line"
        each = duration(cost.seconds / cost.count)
        total = f"{cost.count} x {each} = {duration(cost.seconds)}"
        yield (label if k == 0 else ""), f"{where}  {at.what}: {total}{library}"


def worst(table: Mapping[Place, Cost]) -> list[tuple[Place, Cost]]:
    """The most expensive places."""
    return sorted(table.items(), key=lambda item: -item[1].seconds)[:SHOWN]


def _advice(watch: Watch) -> Iterator[str]:
    """What to change first."""
    steps = len(watch.steps)
    matters = WORTH * sum(step.seconds for step in watch.steps[1:])
    often = [at for at, cost in worst(watch.reads) if cost.count >= steps / 2 and cost.seconds > matters]
    if often and steps >= 4:
        lines = ", ".join(sorted({f"{short(at.file)}:{at.line}" for at in often}))
        yield f"{lines}: a wait in every step; read every tenth step, or tarry.add_step_closure(..., run_async=True)"
    for at, cost in [(at, cost) for at, cost in worst(watch.fallbacks) if cost.seconds > matters][:1]:
        yield f"{short(at.file)}:{at.line}: {at.what} runs by itself, because {cost.reason}; write it otherwise there"
    again = [fields["reason"] for fields in watch.compiles if fields["again"]]
    if len(again) > 2:
        yield "keep shapes and numbers alike from step to step (DataLoader(drop_last=True)): docs/compiling.md"
    if steps and not any(step.compiled for step in watch.steps):
        why = max(watch.references, key=lambda reason: watch.references[reason], default="")
        if why:
            yield f"no step had a program: {why}. --compile wait waits for it; programs stay on disk for the next run"
