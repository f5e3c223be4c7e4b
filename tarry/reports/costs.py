"""What a run has cost, by line of the program: reads, fallbacks, compiles, replays, and the rest. Dearest first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tarry.reports.reading import Run
from tarry.reports.steps import where

GROUPS = {
    "read": "reads",
    "fallback": "fallbacks",
    "compile": "compiles",
    "slow_compile": "slow compiles",
    "takeover": "takeovers",
    "budget_cut": "cuts",
    "collective": "collectives",
    "compiling": "",
    "sync": "",  # a step is no cost of its own: the timeline has it
    "execute": "",
    "cache_hit": "",
    "pieces": "",
    "replay": "replays",
    "replay_refused": "replays",
    "replay_guard_failed": "replays",
    "replay_verified": "replays",
    "replay_deviation": "replays",
    "store_hit": "store",
    "store_miss": "store",
    "store_wait": "store",
    "store_skip": "store",
    "store_evict": "store",
    "store_corrupt": "store",
    "reference": "reference path",
    "interpreted": "reference path",
    "error": "failures",
    "backend_fault": "failures",
}
"""In which table a kind of event stands; an empty name: in none. Other kinds stand in "other"."""


@dataclass
class Cost:
    """What happened at one line, and what it took."""

    group: str
    kind: str
    what: str
    place: str
    library: str = ""
    module: str = ""
    reason: str = ""
    remedy: str = ""
    count: int = 0
    seconds: float = 0.0
    awaited: float = 0.0
    """Of `seconds`: those that the program has waited; the others were spent beside it."""
    again: bool = False
    """Of compiles: a graph like it was compiled before."""
    reasons: set[str] = field(default_factory=set)

    def add(self, event: dict[str, Any]) -> None:
        seconds = event.get("seconds", 0.0)
        self.count += 1
        self.seconds += seconds
        self.awaited += 0.0 if event.get("background") else seconds
        self.again |= event.get("again", False)
        self.library = event.get("library") or self.library
        self.module = event.get("module") or self.module
        self.remedy = event.get("remedy") or self.remedy
        if event.get("reason"):
            self.reason = event["reason"]
            self.reasons.add(event["reason"])


def costs(run: Run) -> list[Cost]:
    """All lines that have cost something, the dearest first."""
    found: dict[tuple[str, ...], Cost] = {}
    for event in run.events:
        kind = event["kind"]
        group = GROUPS.get(kind, "other")
        if not group:
            continue
        what, place = _what(event), where(event) or _last_line(event)
        key = (kind, what, place, event.get("reason", "") if group in _BY_REASON else "")
        if key not in found:
            found[key] = Cost(group, kind, what, place, remedy=run.remedies.get(kind, ""))
        found[key].add(event)
    return sorted(found.values(), key=lambda cost: (-cost.seconds, -cost.count))


_BY_REASON = ("compiles", "reference path", "store", "replays", "failures")


def _what(event: dict[str, Any]) -> str:
    match event["kind"]:
        case "read":
            return f".{event.get('method', '')}()"
        case "fallback" | "collective":
            return str(event.get("op", ""))
        case "compile":
            return f"{event.get('operations', 0)} operator{'' if event.get('operations') == 1 else 's'}"
        case "error" | "backend_fault":
            return str(event.get("error", ""))
        case "transfer":
            return str(event.get("direction", ""))
        case _:
            return str(event.get("function") or event.get("backend") or "")


def _last_line(event: dict[str, Any]) -> str:
    lines = event.get("lines")
    return str(lines[-1]) if lines else ""
