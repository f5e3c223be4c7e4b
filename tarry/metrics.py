"""Counters and times of what tarry has done in this process: `tarry.metrics.counters()`, `.report()`, `.reset()`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tarry import events
from tarry.events.text import duration, what, whole_place
from tarry.native import C

SHOWN = 20
"""Places that the report shows, the most expensive first."""
_MAX_PLACES = 4096
"""Places that are kept: a program may make lines as it goes (exec)."""


@dataclass
class Cost:
    """What has happened at one place: how often, what it took, and the last cause and remedy."""

    count: int = 0
    seconds: float = 0.0
    reason: str = ""
    remedy: str = ""


_lock = threading.Lock()
_counts: Counter[str] = Counter()
_seconds: Counter[str] = Counter()
_reasons: Counter[str] = Counter()  # of compiles that another one would have spared
_places: dict[tuple[str, str], Cost] = {}  # by what happened and where
_backend: Callable[[], dict[str, float]] = dict


def _count(kind: str, fields: dict[str, Any]) -> None:
    _count_place(kind, fields)
    if kind == "read":
        return  # known only while events have a subscriber: a count of some of them would mislead
    with _lock:
        if kind == "fallback":
            _counts[f"fallback/{fields['op']}"] += 1
        elif kind == "pieces":
            _counts["pieces"] += fields["calls"]
            _counts["kinds_of_pieces"] += fields["kinds"]
        else:
            _counts[kind] += 1
        if kind == "compile" and fields["again"]:
            _reasons[fields["reason"]] += 1
        if "seconds" in fields:
            _seconds[kind] += fields["seconds"]


def _count_place(kind: str, fields: dict[str, Any]) -> None:
    """Sum up what costs by its place, where that is known. A compile is summed up when it is done."""
    if not fields.get("file") or kind in ("compiling", "slow_compile", "takeover", "error", "reference"):
        return
    known = events.DEFAULTS[kind] | fields
    if not events.KINDS[kind].topic or (kind == "sync" and known["path"] != "reference"):
        return  # nothing to change about it
    with _lock:
        cost = _places.get(key := (what(kind, known), whole_place(known)))
        if cost is None:
            if len(_places) >= _MAX_PLACES:
                return
            cost = _places[key] = Cost()
        cost.count += 1
        cost.seconds += known["seconds"]
        cost.reason, cost.remedy = known["reason"], known["remedy"]


events.count_with(_count)
events.count_places_with(_count_place)


def attach(backend: Callable[[], dict[str, float]]) -> None:
    """Give the counters of the backend."""
    global _backend
    _backend = backend


def _devices() -> range:
    return range(C.device_count())


def _native_fallbacks() -> list[tuple[str, str, int, str, int, float]]:
    """Operators that ran eagerly, as the native part counts them: name, file, line, module, how often, how long."""
    return [found for index in _devices() for found in C.fallbacks(index)]


def _native_counters() -> Counter[str]:
    total: Counter[str] = Counter()
    for index in _devices():
        total.update(C.counters(index))
    total["execute"] = total["reference"] + total["cache_hit"]
    total["sync"] = total["execute"] + total["direct_steps"]
    for op, _, _, _, count, _ in _native_fallbacks():
        total[f"fallback/{op}"] += count
    return Counter({name: count for name, count in total.items() if count or name in ("record", "node_reuse")})


def _native_seconds() -> dict[str, float]:
    total = Counter({"fallback": sum(fallback[-1] for fallback in _native_fallbacks())})
    for index in _devices():
        total.update(C.seconds(index))
    return {name: spent for name, spent in total.items() if spent}


def counters() -> dict[str, float]:
    """How often each thing happened: `record`, `node_reuse`, `sync`, `compile`, `fallback/aten::nonzero`, ...; and what
    the backend counts, under its name (`xla/...`), which `reset` leaves alone."""
    own = _backend()
    with _lock:
        total = _native_counters()
        total.update(_counts)
        return {**total, **own}


def seconds() -> dict[str, float]:
    """Time spent in `compile`, `execute` and `sync`."""
    with _lock:
        total: Counter[str] = Counter(_seconds)
        total.update(_native_seconds())
        return dict(total)


def reset() -> None:
    """Set all counters to zero."""
    with _lock:
        _counts.clear()
        _seconds.clear()
        _reasons.clear()
        _places.clear()
        for index in _devices():
            C.reset_counters(index)


def places() -> list[tuple[str, str, Cost]]:
    """What has happened where, and what it cost, the most expensive first. Compiles and operators that ran by
    themselves always have a line; reads and steps do while events have a subscriber (TARRY_LOG, `events.subscribe`)."""
    events.flush()
    with _lock:
        found = {key: replace(cost) for key, cost in _places.items()}
    for op, file, line, module, count, seconds in _native_fallbacks():
        fields = {"op": op, "file": file, "line": line, "module": module}
        cost = found.setdefault((what("fallback", fields), whole_place(fields)), Cost())
        cost.count += count
        cost.seconds += seconds
        cost.remedy = cost.remedy or events.KINDS["fallback"].remedy
    rows = [(happened, where, cost) for (happened, where), cost in found.items()]
    return sorted(rows, key=lambda row: (-row[2].seconds, -row[2].count))


def report() -> str:
    """A readable report: counts, times, why graphs were compiled again, and what happened at which line, by cost."""
    counts, times = counters(), seconds()
    lines = ["tarry metrics"]
    for name in sorted(counts):
        spent = f"  {times[name]:.3f} s" if name in times else ""
        lines.append(f"  {name:<40} {counts[name]:>10.10g}{spent}")
    if counts.get("run_ahead_off"):
        lines.append(
            "run_ahead_off: steps for which no second thread was used, because PyTorch's threads take all cores; "
            "torch.set_num_threads() changes that"
        )
    if counts.get("direct"):
        lines.append(
            "direct: operators that ran at once, as in eager PyTorch, because no program computes their steps, or none "
            "yet; tarry.config.direct_calls = False has them recorded"
        )
    with _lock:
        reasons = _reasons.most_common()
    if reasons:
        lines.append("compiled again")
        lines.extend(f"  {count:>4}  {reason}" for reason, count in reasons)
    rows = places()
    if rows:
        lines.append("by line, the most expensive first")
        for happened, where, cost in rows[:SHOWN]:
            lines.append(f"  {where}  {happened}: {_total(cost)}")
            lines += [f"      {label}: {text}" for label, text in (("why", cost.reason), ("do", cost.remedy)) if text]
        if len(rows) > SHOWN:
            lines.append(f"  and {len(rows) - SHOWN} more: tarry.metrics.places()")
    return "\n".join(lines)


def _total(cost: Cost) -> str:
    if not cost.seconds:
        return f"{cost.count} times"
    return duration(cost.seconds) if cost.count == 1 else f"{cost.count} x {duration(cost.seconds / cost.count)}"
