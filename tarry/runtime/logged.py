"""Events that the native part has logged (csrc/execute/event_log.h), as the stream takes them."""

from __future__ import annotations

from typing import Any

from tarry.native import C

_CAPS = {
    "node cap": ("so many operators were pending", "max_pending_nodes"),
    "memory cap": ("pending work held so much memory", "max_pending_bytes"),
}
"""Why the native part cuts a step by itself: in words, and the setting."""


def budget_cut(reason: str, **fields: Any) -> dict[str, Any] | None:
    """The fields of the event `budget_cut` for a step that was cut for this reason; None if it was another."""
    if reason not in _CAPS:
        return None
    why, setting = _CAPS[reason]
    return {**fields, "reason": f"{why} that tarry.config.{setting} ended the step"}


class Logged:
    """The native part, as a source of events."""

    def __init__(self) -> None:
        self._logs = False

    def set_watched(self, watcher: str, watches: bool, /) -> None:
        C.set_watched(watcher, watches)

    def set_logging(self, on: bool, /) -> None:
        if on != self._logs:  # else what is logged would be dropped
            self._logs = on
            C.set_logging(on)

    def take_events(self) -> tuple[list[tuple[str, dict[str, Any], float, int]], int]:
        """What was logged, and how many events were lost."""
        taken, lost = C.take_events()
        found: list[tuple[str, dict[str, Any], float, int]] = []
        for kind, fields, time, thread in taken:
            found.append((kind, fields, time, thread))
            if kind == "sync" and fields["reason"] in _CAPS:
                names = ("operations", "seconds", "device", "file", "line", "library", "module")
                cut = budget_cut(fields["reason"], **{name: fields[name] for name in names})
                assert cut is not None
                found.append(("budget_cut", cut, time, thread))
        return found, lost
