"""The verdict as text: what `tarry report` prints, and what `print(report)` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tarry.reports.compare import Judged, mode, names, verdict_of_two
from tarry.reports.costs import costs
from tarry.reports.reading import Run
from tarry.reports.steps import timeline
from tarry.reports.verdict import verdict

SHOWN = 5


def judge(run: Run) -> Judged:
    """A run with all that can be found out about it."""
    made, dear = timeline(run), costs(run)
    return Judged(run, made, dear, verdict(run, made, dear))


def summary(runs: Sequence[Run]) -> str:
    """A few lines about each run."""
    judged = [judge(run) for run in runs]
    lines = [line for name, each in zip(names(runs), judged, strict=True) for line in _lines(name, each)]
    if mode(runs) == "compare":
        lines.append(verdict_of_two(judged))
    return "\n".join(lines)


def _lines(name: str, each: Judged) -> Iterator[str]:
    found = each.verdict
    yield f"{name}: {found.steps} steps in {found.seconds:.1f} s, {found.state}: {found.state_reason}"
    lost = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in found.lost.items())
    yield f"  waited for: {lost}; {found.background:.1f} s of compiling in the background"
    for advice in found.advice[:SHOWN]:
        where = f"{advice.place}: " if advice.place else ""
        yield f"  {advice.seconds:8.2f} s  {where}{advice.title}"
        yield f"              {advice.remedy}"
    yield from (f"  note: {note}" for note in found.notes)
