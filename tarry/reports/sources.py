"""Lines of the program around the places that a report names, so that the page can show them."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable

AROUND = 8
"""Lines before and after each place."""
MAX_FILES = 300
MAX_LENGTH = 400
"""Characters of a line."""


def excerpts(places: Iterable[str], until: float) -> dict[str, dict[str, object]]:
    """For each file of places (`file:line`): its lines around them, by number, and whether it was changed after `until`
    (seconds since 1970). Only Python's sources are looked at."""
    wanted: dict[str, set[int]] = {}
    for place in places:
        file, _, line = place.rpartition(":")
        if line.isdecimal() and (file.endswith(".py") or file in linecache.cache):  # cells of a notebook are there
            wanted.setdefault(file, set()).add(int(line))
    found: dict[str, dict[str, object]] = {}
    for file, lines in list(wanted.items())[:MAX_FILES]:
        text = linecache.getlines(file)
        around = {k for line in lines for k in range(max(1, line - AROUND), min(len(text), line + AROUND) + 1)}
        if around:
            excerpt = {k: text[k - 1].rstrip("\n")[:MAX_LENGTH] for k in sorted(around)}
            found[file] = {"lines": excerpt, "changed": _changed(file, until)}
    return found


def _changed(file: str, until: float) -> bool:
    try:
        return os.stat(file).st_mtime > until
    except OSError:
        return False
