"""Jupyter: rich displays, and `%load_ext tarry`, which says after each cell what it compiled and what it waited for.

Nothing of IPython is imported: an extension is given the shell, and a display is a method that IPython looks for.
"""

from __future__ import annotations

import html
import sys
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

from tarry import events

_TOLD = ("compile", "read", "sync", "fallback")
_ATTRIBUTE = "_tarry_cells"


class Text(str):
    """Text that a notebook shows as it is, in a frame that scrolls; a string everywhere else."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f'<pre style="max-height: 40em; overflow: auto; line-height: 1.3">{html.escape(self)}</pre>'


class Cells:
    """Collects the events of a cell, and shows what it cost when it is done."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._watching = ExitStack()
        self._seen: list[events.Event] = []

    def install(self) -> None:
        self._shell.events.register("pre_run_cell", self._begin)
        self._shell.events.register("post_run_cell", self._end)

    def remove(self) -> None:
        self._watching.close()
        self._shell.events.unregister("pre_run_cell", self._begin)
        self._shell.events.unregister("post_run_cell", self._end)

    def _begin(self, *info: Any) -> None:
        self._watching.close()
        self._seen = []
        self._watching.enter_context(events.subscribe(self._note))

    def _note(self, event: events.Event) -> None:
        if event.kind in _TOLD:
            self._seen.append(event)

    def _end(self, *result: Any) -> None:
        self._watching.close()
        rows, self._seen = summarize(self._seen), []
        if not rows:
            return
        if "IPython.display" in sys.modules and getattr(self._shell, "kernel", None) is not None:
            sys.modules["IPython.display"].display({"text/plain": as_text(rows), "text/html": as_html(rows)}, raw=True)
        else:
            print(as_text(rows))


Row = tuple[str, str, int, float]  # what, where, how often, seconds


def summarize(seen: list[events.Event]) -> list[Row]:
    """One row for each thing at each place, the dearest first."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in seen:
        fields = event.fields
        what = event.kind
        if what == "sync":
            what = f"step ({fields['reason']})"
        elif what == "compile":
            what = f"compile, {fields['operations']} operators" + (f": {fields['reason']}" if fields["reason"] else "")
        elif what == "fallback":
            what = f"fallback {fields['op']}"
        elif fields.get("method"):
            what = f"read .{fields['method']}()"
        lines = fields.get("lines")
        place = f"{fields['file']}:{fields['line']}" if fields["file"] else lines[0] if lines else ""
        found[what, _cell(place)].append(fields["seconds"])
    rows = [(what, place, len(costs), sum(costs)) for (what, place), costs in found.items()]
    return sorted(rows, key=lambda row: -row[3])


def _cell(place: str) -> str:
    """The place as a reader of a notebook knows it: cells are files of strange names."""
    file, _, line = place.rpartition(":")
    if "ipykernel" in file or file.startswith("<ipython-input"):
        return f"line {line} of a cell"
    return place


def as_text(rows: list[Row]) -> str:
    return "\n".join(
        ["tarry:", *(f"  {what}: {count} x, {1000 * cost:.1f} ms  {place}" for what, place, count, cost in rows)]
    )


def as_html(rows: list[Row]) -> str:
    cells = "".join(
        f"<tr><td style='text-align:left'>{html.escape(what)}</td><td style='text-align:left'>{html.escape(place)}</td>"
        f"<td>{count}</td><td>{1000 * cost:.1f} ms</td></tr>"
        for what, place, count, cost in rows
    )
    return f"<table><tr><th>tarry</th><th>where</th><th>times</th><th>cost</th></tr>{cells}</table>"


def load(shell: Any) -> None:
    """`%load_ext tarry`."""
    if getattr(shell, _ATTRIBUTE, None) is None:
        cells = Cells(shell)
        cells.install()
        setattr(shell, _ATTRIBUTE, cells)


def unload(shell: Any) -> None:
    """`%unload_ext tarry`."""
    cells = getattr(shell, _ATTRIBUTE, None)
    if cells is not None:
        cells.remove()
        setattr(shell, _ATTRIBUTE, None)
