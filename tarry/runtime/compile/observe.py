"""What reports are given of each graph that gets a program: the graph at every stage, and the program's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tarry.backends.base import Backend, Recording
from tarry.ir.build import from_raw
from tarry.ir.graph import Graph
from tarry.runtime.compile.computations import Build

Observer: TypeAlias = Callable[
    [tuple[int, int], Mapping[str, Any], Callable[[], Mapping[str, Graph]], Callable[[], str] | None], None
]
"""Called with a graph's key, facts about it (`tarry/reports/format.py`), and what makes its stages and the text of its
program: that may take long, and can be done later."""


def show_begun(observer: Observer | None, build: Build) -> None:
    """A graph is being compiled in the background, which may take longer than the process lives."""
    if observer is None:
        return
    recording = build.recording
    facts = {**_facts(build.backend, recording, 0.0), "reason": "", "origin": "compiling", "background": True}
    observer(recording.key, facts, lambda: {"recorded": recording.recorded}, None)


def show_compiled(observer: Observer | None, build: Build, seconds: float, background: bool) -> None:
    """A backend has compiled a graph, or refused it."""
    if observer is None or build.stages is None:
        return
    recording, stages = build.recording, build.stages
    facts = {**_facts(build.backend, recording, seconds), "reason": build.reason, "origin": build.origin}
    facts["background"] = background
    observer(recording.key, facts, lambda: {"recorded": recording.recorded, **stages}, build.text)


def show_taken(observer: Observer | None, backend: Backend, recording: Recording, seconds: float) -> None:
    """A backend has taken a graph over as it was recorded."""
    if observer is None:
        return
    raw = recording.raw
    facts = {**_facts(backend, recording, seconds), "reason": "", "origin": "recorded", "background": False}
    observer(recording.key, facts, lambda: {"recorded": from_raw(raw)}, None)


def _facts(backend: Backend, recording: Recording, seconds: float) -> dict[str, Any]:
    operators, lines = recording.num_operations, recording.lines
    return {"backend": backend.name, "operators": operators, "lines": lines, "seconds": seconds}
