"""What `tarry demo` prints at its end: the runs side by side, and what tarry did."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from rich.table import Table

if TYPE_CHECKING:
    from tarry.events import Event

WINDOW = 10  # steps whose mean loss is compared: dropout draws other numbers on tarry, which single steps show


@dataclass
class Run:
    """What one run of the script gave."""

    # Runs with other dropout masks and bf16 arithmetic stay within a percent or so of each other; a wrong operator
    # makes more of a difference.
    TOLERANCE: ClassVar[float] = 3e-2

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of the steps without validation
    validation: list[float] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """Median of the second half: the first one may have been spent waiting for a compiler."""
        return statistics.median(self.seconds[len(self.seconds) // 2 :] or [math.nan]) * 1e3

    @property
    def end(self) -> float:
        return self.windows()[-1]

    def windows(self) -> list[float]:
        """Mean losses of the stretches that the run consists of; the last one may be longer."""
        edges = [*range(0, max(1, len(self.losses) - WINDOW + 1), WINDOW), len(self.losses)]
        return [statistics.fmean(self.losses[low:high]) for low, high in pairwise(edges)]


def compare(eager: Run, other: Run) -> float:
    """The largest relative difference of any mean loss, and of the validation losses."""
    pairs = [*zip(eager.windows(), other.windows(), strict=True), *zip(eager.validation, other.validation, strict=True)]
    differences = [abs(a - b) / max(abs(a), 1e-9) for a, b in pairs]
    return max(differences, key=lambda value: math.inf if math.isnan(value) else value)


def comparison(eager: Run, compiled: Run | None, lazy: Sequence[Run], difference: float) -> Table:
    """The runs, each a column."""
    runs = [eager, *([compiled] if compiled else []), *lazy]
    table = Table(title="the same script, on another device", title_justify="left")
    for column in ("", *(run.name for run in runs), ""):
        table.add_column(column, justify="right" if column else "left")
    verdict = "[green]match[/]" if difference <= Run.TOLERANCE else "[red]DIFFER[/]"
    table.add_row("first loss", *(f"{run.losses[0]:.4f}" for run in runs), "")
    table.add_row(
        "final loss", *(f"{run.end:.4f}" for run in runs), f"{verdict} (means differ by {difference:.1%} at most)"
    )
    if eager.validation:
        table.add_row("validation loss", *(f"{run.validation[-1]:.4f}" for run in runs), "")
    ratio = f"tarry takes {lazy[-1].step_ms / eager.step_ms:.2f} times eager's"
    if compiled:
        ratio += f", {lazy[-1].step_ms / compiled.step_ms:.2f} times torch.compile's"
    table.add_row("time per step, ms", *(f"{run.step_ms:.2f}" for run in runs), ratio)
    table.add_row("first step, ms", *(_ms(run.seconds[:1]) for run in runs), "with the start of the loader's workers")
    table.add_row("longest later step, ms", *(_ms(run.seconds[1:]) for run in runs), "")
    table.add_row("all steps, s", *(f"{sum(run.seconds):.1f}" for run in runs), "with the waits for compilers in them")
    return table


def _ms(seconds: Sequence[float]) -> str:
    return f"{max(seconds) * 1e3:.0f}" if seconds else "-"


@dataclass
class Work:
    """What tarry did, from its events and counters."""

    events: Sequence[Event]
    steps: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    backend: str = ""

    def count(self, *kinds: str) -> int:
        return sum(event.kind in kinds for event in self.events)

    @property
    def reference_steps(self) -> int:
        return self.count("reference", "interpreted")

    @property
    def reasons(self) -> list[str]:
        """Why graphs were compiled again."""
        compiles = [event.fields for event in self.events if event.kind == "compile"]
        return [str(fields["reason"]) for fields in compiles if fields["again"]]


def _takeover(fields: Mapping[str, Any]) -> str:
    return (
        f"{fields['operations']} operators, compiled in {fields['seconds']:.0f} s: "
        f"{fields['before'] * 1e3:.0f} ms -> {fields['after'] * 1e3:.0f} ms"
    )


def work_table(work: Work) -> Table:
    fallbacks = [str(event.fields["op"]) for event in work.events if event.kind == "fallback"]
    compiling = sum(float(event.fields.get("seconds", 0)) for event in work.events if event.kind == "compile")
    syncs = work.count("sync")
    table = Table(title=f"what tarry did in {work.steps} steps", title_justify="left")
    for column in ("", "count", ""):
        table.add_column(column, justify="right" if column == "count" else "left")
    again = work.counters.get("node_reuse", 0)
    recorded = work.counters.get("record", 0) + again
    taken = [_takeover(event.fields) for event in work.events if event.kind == "takeover"]
    rows = (
        ("operators recorded", recorded, f"{again / max(1, recorded):.0%} of them as the step before left them"),
        ("graphs run", syncs, "one for a training step, one for a validation batch"),
        ("on the reference path", work.reference_steps, "operator by operator, while there was no program"),
        ("compiles", work.count("compile"), f"by {work.backend}, {compiling:.1f} s" if compiling else ""),
        ("programs that took over", len(taken), "; ".join(taken)),
        ("recompiles", len(work.reasons), "; ".join(work.reasons) or "no graph had to be compiled again"),
        ("programs from disk", work.count("store_hit"), "compiled by an earlier process"),
        ("fallbacks", len(fallbacks), ", ".join(sorted(set(fallbacks))) or "every operator was recorded"),
    )
    for name, count, meaning in rows:
        table.add_row(name, f"{count:,}", meaning)
    return table
