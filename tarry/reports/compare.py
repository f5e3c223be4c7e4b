"""Several runs side by side: two to be compared, or the ranks of one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tarry.reports.costs import Cost
from tarry.reports.reading import EventsFileError, Run
from tarry.reports.steps import Timeline
from tarry.reports.verdict import Verdict, duration

MAX_RUNS = 64
MAX_ROWS = 500

Mode = Literal["run", "compare", "ranks"]


@dataclass(frozen=True)
class Judged:
    """A run with all that was found out about it."""

    run: Run
    timeline: Timeline
    costs: list[Cost]
    verdict: Verdict


def mode(runs: Sequence[Run]) -> Mode:
    """How runs are shown together. Raises EventsFileError if they cannot be."""
    if len(runs) == 1:
        return "run"
    ranks = [run.rank for run in runs]
    if all(run.header["world_size"] > 1 for run in runs) and len(set(ranks)) == len(ranks):
        return "ranks"
    if len(runs) > 2:
        names = ", ".join(f"{run.path} (rank {run.rank} of {run.header['world_size']})" for run in runs[:MAX_RUNS])
        raise EventsFileError(
            f"two runs can be compared, or all ranks of one be shown side by side; of {names}, some have the same rank"
        )
    return "compare"


def names(runs: Sequence[Run]) -> list[str]:
    """What to call each run: its rank, or the part of its path in which it differs from the others."""
    match mode(runs):
        case "ranks":
            return [f"rank {run.rank}" for run in runs]
        case "compare" if runs[0].path == runs[1].path:
            return ["A", "B"]
        case "compare":
            return [f"{letter}: {run.path}" for letter, run in zip("AB", runs, strict=True)]
        case _:
            return [runs[0].path]


def figures(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Rows of the table of figures: what is counted, its unit, and a value (or None) for each run."""
    rows: list[tuple[str, str, list[float | None]]] = [
        ("steps", "", [float(len(each.timeline.steps)) for each in judged]),
        ("steps by programs", "", [float(each.verdict.compiled_steps) for each in judged]),
        ("time of the run", "s", [each.verdict.seconds for each in judged]),
        ("first step", "s", [each.verdict.first for each in judged]),
        ("median step without a program", "s", [each.verdict.before for each in judged]),
        ("median step by a program", "s", [each.verdict.after for each in judged]),
        ("slowest of 100 steps, at the end", "s", [_slow(each.timeline) for each in judged]),
        ("compiles", "", [float(_count(each.run, "compile")) for each in judged]),
        ("waited for compiles", "s", [each.verdict.lost["compiles"] for each in judged]),
        ("compiled in the background", "s", [each.verdict.background for each in judged]),
        ("programs from disk", "", [float(_count(each.run, "store_hit")) for each in judged]),
        ("waited for values (reads)", "s", [each.verdict.lost["reads"] for each in judged]),
        ("reads", "", [float(_count(each.run, "read")) for each in judged]),
        ("fallbacks", "s", [each.verdict.lost["fallbacks"] for each in judged]),
        ("errors", "", [float(_count(each.run, "error")) for each in judged]),
    ]
    return [{"what": what, "unit": unit, "values": values} for what, unit, values in rows]


def _count(run: Run, kind: str) -> int:
    return sum(event["kind"] == kind for event in run.events)


def _slow(timeline: Timeline) -> float | None:
    last = sorted(step.seconds for step in timeline.steps[-100:])
    return last[int(len(last) * 0.99)] if last else None


def places(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """What each line has cost in each run; those first where runs differ most."""
    tables: list[Mapping[tuple[str, str, str], Cost]] = [_by_place(each.costs) for each in judged]
    rows: list[dict[str, Any]] = []
    for key in dict.fromkeys(key for table in tables for key in table):
        found = [table.get(key) for table in tables]
        seconds = [0.0 if cost is None else cost.seconds for cost in found]
        counts = [0 if cost is None else cost.count for cost in found]
        group, what, place = key
        rows.append({"group": group, "what": what, "place": place, "seconds": seconds, "counts": counts})
    rows.sort(key=lambda row: -_spread(row["seconds"]) - 1e-9 * _spread(row["counts"]))
    return rows[:MAX_ROWS]


def _by_place(costs: Sequence[Cost]) -> dict[tuple[str, str, str], Cost]:
    """Costs that differ in their reasons only are added up."""
    found: dict[tuple[str, str, str], Cost] = {}
    for cost in costs:
        key = (cost.group, cost.what, cost.place)
        if key not in found:
            found[key] = Cost(cost.group, cost.kind, cost.what, cost.place)
        found[key].seconds += cost.seconds
        found[key].count += cost.count
    return found


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def graphs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Which graphs were compiled in which run, by the hash of their structure: it is the same in all processes."""
    rows: dict[str, dict[str, Any]] = {}
    for k, run in enumerate(runs):
        for graph in run.graphs.values():
            facts = graph.facts
            row = rows.setdefault(
                facts["key"],
                {
                    "key": facts["key"],
                    "operators": facts["operators"],
                    "lines": facts["lines"],
                    "seconds": [None] * len(runs),
                },
            )
            row["seconds"][k] = (row["seconds"][k] or 0.0) + facts["seconds"]
    return sorted(rows.values(), key=lambda row: (all(s is not None for s in row["seconds"]), -row["operators"]))[
        :MAX_ROWS
    ]


def verdict_of_two(judged: Sequence[Judged]) -> str:
    """Which of two runs has the faster steps, in words."""
    medians = [_typical(each) for each in judged]
    if None in medians or not medians[0] or not medians[1]:
        return "one of the runs has too few steps to compare"
    one, other = float(medians[0]), float(medians[1])
    if max(one, other) < 1.05 * min(one, other):
        return f"steps take about as long: {duration(one)} and {duration(other)}"
    word = "faster" if other < one else "slower"
    ratio = max(one, other) / min(one, other)
    return f"steps of B are {ratio:.3g} times {word} than those of A: {duration(other)}, and not {duration(one)}"


def _typical(each: Judged) -> float | None:
    """The median of the second half of the steps: what it was like once it was warm."""
    steps = each.timeline.steps
    return statistics.median(step.seconds for step in steps[len(steps) // 2 :]) if steps else None
