"""Events in words: one line each, for the log and the report of `tarry.metrics`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def short(file: str) -> str:
    """A path as seen from here, if it lies here; else its last parts."""
    if not file:
        return "an unknown line"
    try:
        relative = os.path.relpath(file)
    except OSError:  # the current directory is gone
        return file
    if not relative.startswith(".."):
        return relative
    return file if file.count("/") < 4 else ".../" + "/".join(file.split("/")[-3:])


def short_line(line: str) -> str:
    """The same of "file:line"."""
    file, _, number = line.rpartition(":")
    return f"{short(file)}:{number}"


def place(fields: Mapping[str, Any]) -> str:
    """The line of an event; for a step, the line that it ends with."""
    if fields.get("file"):
        return f"{short(fields['file'])}:{fields['line']}"
    lines = fields.get("lines")
    return short_line(lines[-1]) if lines else "an unknown line"


def whole_place(fields: Mapping[str, Any]) -> str:
    """The line of an event, the line of a library that it called, and the module."""
    by = f", by {short_line(fields['library'])}" if fields.get("library") else ""
    module = f" in {fields['module']}" if fields.get("module") else ""
    return f"{place(fields)}{module}{by}"


def duration(seconds: float) -> str:
    """A time with a unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


def what(kind: str, fields: Mapping[str, Any]) -> str:
    """What has happened, without its place, cause and cost."""
    size = fields.get("operations", 0)
    match kind:
        case "read":
            return ".item()" if fields["method"] == "item" else f"{fields['method']} to the host"
        case "fallback":
            return f"{fields['op']} ran by itself"
        case "sync":
            return f"step of {size} operators ({fields['path']})"
        case "budget_cut":
            return f"step cut at {size} operators"
        case "compiling":
            return f"compiling a step of {size} operators{' in the background' if fields['background'] else ''}"
        case "compile" | "slow_compile":
            return f"step of {size} operators {'compiled again' if fields['again'] else 'compiled'}"
        case "error" | "backend_fault":
            return f"{kind.replace('_', ' ')} ({fields['backend']}, {fields['stage']})"
        case "replay_refused" | "replay_guard_failed" | "replay_deviation":
            return f"{fields['function']}: {kind.replace('_', ' ')}"
        case "pieces":
            return f"compiling {fields['calls']} pieces of {fields['kinds']} kinds"
    return kind.replace("_", " ")


def line(kind: str, fields: Mapping[str, Any]) -> str:
    """An event as one line: what, where, how long, why, and what to do about it."""
    if kind == "takeover":
        pace = f": {duration(fields['before'])} -> {duration(fields['after'])}" if fields["before"] else ""
        spent = duration(fields["seconds"])
        return f"step of {fields['operations']} operators ({whole_place(fields)}) compiled in {spent}{pace}"
    cost = f", {duration(fields['seconds'])}" if fields["seconds"] else ""
    reason = fields["reason"] or fields.get("error", "")
    why = f": {reason}" if reason else ""
    remedy = f" [{fields['remedy']}]" if fields["remedy"] else ""
    return f"{what(kind, fields)} at {whole_place(fields)}{cost}{why}{remedy}"
