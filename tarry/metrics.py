"""Counters and times of what tarry has done in this process: `tarry.metrics.counters()`, `.report()`, `.reset()`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from tarry import events

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_seconds: Counter[str] = Counter()
_sites: Counter[tuple[str, str]] = Counter()  # (operator, file:line) of each fallback
_reasons: Counter[str] = Counter()  # of compiles that another one would have spared
_native: Callable[[], dict[str, int]] = dict
_native_fallbacks: Callable[[], list[tuple[str, str, int, int]]] = list
_native_seconds: Callable[[], dict[str, float]] = dict
_reset_native: Callable[[], None] = lambda: None  # noqa: E731 - replaced when the native part is loaded
_backend: Callable[[], dict[str, float]] = dict


def _count(kind: str, fields: dict[str, Any]) -> None:
    with _lock:
        if kind == "fallback":
            _counts[f"fallback/{fields['op']}"] += 1
            _sites[fields["op"], f"{fields['file']}:{fields['line']}"] += 1
        elif kind == "pieces":
            _counts["pieces"] += fields["calls"]
            _counts["kinds_of_pieces"] += fields["kinds"]
        else:
            _counts[kind] += 1
        if kind == "compile" and fields.get("reason"):
            _reasons[fields["reason"]] += 1
        if "seconds" in fields:
            _seconds[kind] += fields["seconds"]


events.count_with(_count)


def attach(
    native: Callable[[], dict[str, int]],
    fallbacks: Callable[[], list[tuple[str, str, int, int]]],
    seconds: Callable[[], dict[str, float]],
    reset: Callable[[], None],
    backend: Callable[[], dict[str, float]],
) -> None:
    """Give the sources of what the native part counts (events, operators that ran eagerly, with their lines, and times)
    and of the counters of the backend."""
    global _native, _native_fallbacks, _native_seconds, _reset_native, _backend
    _native, _native_fallbacks, _native_seconds, _reset_native, _backend = native, fallbacks, seconds, reset, backend


def counters() -> dict[str, float]:
    """How often each thing happened: `record`, `node_reuse`, `sync`, `compile`, `fallback/aten::nonzero`, ...; and what
    the backend counts, under its name (`xla/...`), which `reset` leaves alone."""
    own = _backend()
    with _lock:
        total: Counter[str] = Counter(_native())
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
        _sites.clear()
        _reasons.clear()
        _reset_native()


def report() -> str:
    """A readable report: counts, times, why graphs were compiled again, and where each fallback came from."""
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
    with _lock:
        found, reasons = Counter(_sites), _reasons.most_common()
    for op, file, line, count in _native_fallbacks():
        found[op, f"{file}:{line}"] += count
    sites = found.most_common()
    if reasons:
        lines.append("compiled again")
        lines.extend(f"  {count:>4}  {reason}" for reason, count in reasons)
    if sites:
        lines.append("fallbacks by line")
        lines.extend(f"  {op:<40} {count:>10}  {site}" for (op, site), count in sites)
    return "\n".join(lines)
