"""Places of a program and times, as a terminal shows them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def short(file: str) -> str:
    """A path as seen from here, if it lies here; else its last parts."""
    if not file:
        return "an unknown line"
    relative = os.path.relpath(file)
    if not relative.startswith(".."):
        return relative
    return file if file.count("/") < 4 else ".../" + "/".join(file.split("/")[-3:])


def place(fields: Mapping[str, Any]) -> str:
    """The line of an event; for a step, the line that it ends with."""
    if fields.get("file"):
        return f"{short(fields['file'])}:{fields['line']}"
    lines = fields.get("lines")
    if not lines:
        return "an unknown line"
    file, _, line = lines[-1].rpartition(":")
    return f"{short(file)}:{line}"


def duration(seconds: float) -> str:
    """A time with a unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
