"""Reads files of events (`format.py`) into a `Run`. Needs neither torch nor the native part."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tarry.reports.format import OWN, VERSION, problems

SUFFIX = ".json"


class EventsFileError(Exception):
    """A file that is none of events, or of another version."""


@dataclass
class GraphRecord:
    """What a file has about one compiled graph."""

    facts: dict[str, Any]
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    program: str = ""


@dataclass
class Run:
    """One process, from its file of events."""

    path: str
    header: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    graphs: dict[str, GraphRecord] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    remedies: dict[str, str] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    """The last line; None if the process was killed."""
    skipped: int = 0
    """Lines that make no sense."""

    @property
    def rank(self) -> int:
        return int(self.header["rank"])

    @property
    def seconds(self) -> float:
        """How long it was recorded."""
        last = self.events[-1]["t"] if self.events else 0.0
        return float(last if self.end is None else self.end["t"])


def read(path: str | os.PathLike[str]) -> Run:
    """The run in a file. Its last line may be cut off: the process may have been killed while it was written."""
    name = os.fspath(path)
    try:
        with Path(name).open("rb") as file:
            run = Run(name, _header(name, file.readline()))
            for data in file:
                _add(run, data)
    except OSError as error:
        raise EventsFileError(f"cannot read {name}: {error.strerror}") from None
    return run


def _header(name: str, data: bytes) -> dict[str, Any]:
    if not data.strip():
        raise EventsFileError(f"{name} is empty: nothing was recorded, or the process was killed at once")
    if data.lstrip()[:1] == b"<":
        raise EventsFileError(f"{name} is a page: give the file of events beside it, {_twin(name)}")
    header = _parsed(data)
    if header is None or "tarry_events" not in header:
        raise EventsFileError(
            f"{name} is no file of events: its first line is no header. Files of events are made by "
            f"tarry run --report FILE.html, and by tarry.report('FILE.html')"
        )
    version = header["tarry_events"]
    if version != VERSION:
        raise EventsFileError(
            f"{name} has version {version!r} of the format, and this tarry reads version {VERSION}: it was made by "
            f"tarry {header.get('tarry', '(unknown)')}; use that one"
        )
    wrong = list(problems(header, header=True))
    if wrong:
        raise EventsFileError(f"{name} has a damaged header: {'; '.join(wrong)}")
    return header


def _twin(page: str) -> str:
    return str(Path(page).with_suffix(SUFFIX))


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(data)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _add(run: Run, data: bytes) -> None:
    line = _parsed(data)
    if line is None or next(problems(line), None) is not None:
        run.skipped += bool(data.endswith(b"\n") and data.strip())  # the last line may be half of one
        return
    kind = line["kind"]
    if kind not in OWN:
        run.events.append(line)
    elif kind == "thread":
        run.threads[line["thread"]] = line["name"]
    elif kind == "remedies":
        run.remedies = line["of"]
    elif kind == "end":
        run.end = line
    elif kind == "graph":
        known = run.graphs.get(line["graph"])  # it is, if it was being compiled
        run.graphs[line["graph"]] = GraphRecord(line) if known is None else GraphRecord(line, known.stages)
    elif line["graph"] in run.graphs:
        graph = run.graphs[line["graph"]]
        if kind == "stage":
            graph.stages[line["stage"]] = line
        elif kind == "same_stage" and line["as"] in graph.stages:
            graph.stages[line["stage"]] = graph.stages[line["as"]]
        elif kind == "program":
            graph.program = line["text"]


def ordered(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Events by the time at which they were over. Threads write one after the other, so a file is nearly in order."""
    return iter(sorted(events, key=lambda event: event["t"]))
