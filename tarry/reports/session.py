"""A recording that ends in a page: what `tarry.report(path)` gives."""

from __future__ import annotations

import html
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tarry import events
from tarry.ir.graph import Graph
from tarry.reports.capture import Capture
from tarry.reports.format import VERSION
from tarry.reports.page import page
from tarry.reports.reading import SUFFIX, read
from tarry.reports.recorder import Recorder
from tarry.reports.terminal import summary

_log = logging.getLogger("tarry")


class Report:
    """Records events from now on. `write()` makes the page of what has happened so far, `close()` ends the recording
    and makes it for good; at the end of the process, or of a `with` block, that happens by itself."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        versions: Mapping[str, str],
        counters: Callable[[], dict[str, float]],
        backend: Callable[[], dict[str, str]],
        observe: Callable[[Callable[..., None] | None], None],
    ) -> None:
        """`observe` has a function called with each graph that is compiled."""
        self.path = _of_rank(Path(path))
        self.events_path = self.path.with_suffix(SUFFIX)
        if self.path == self.events_path:
            raise ValueError(f"tarry.report: {path} is the name of a page: it ends in .html, and not in {SUFFIX}")
        self._counters, self._backend = counters, backend
        self._recorder = Recorder(self.events_path, _header(versions, counters()))
        self._capture = Capture()
        self._stack = ExitStack()
        self._stack.enter_context(events.subscribe(self._recorder, live=False))
        observe(self.on_graph)
        self._stack.callback(observe, None)

    def on_graph(
        self,
        key: tuple[int, int],
        facts: Mapping[str, Any],
        stages: Callable[[], Mapping[str, Graph]],
        text: Callable[[], str] | None,
    ) -> None:
        """A graph was compiled: have it written down."""
        self._recorder.add(partial(self._capture.lines, key, facts, stages, text))

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether this is the report of that name."""
        return _of_rank(Path(path)) == self.path

    @property
    def active(self) -> bool:
        return self._recorder.active

    def write(self) -> Path:
        """Write the page of what has happened so far."""
        if self.active:
            events.flush()
            self._recorder.flush()
        self.path.write_text(page([read(self.events_path)]), encoding="utf-8")
        return self.path

    def close(self) -> None:
        """End the recording, and write the page. A program must not fail because its page cannot be made."""
        if not self.active:
            return
        try:
            self._stack.close()
        finally:
            self._recorder.close({"counters": self._counters(), **self._backend()})
        try:
            self.write()
        except Exception as error:
            _log.warning(
                "tarry: report: %s could not be written: %s: %s. Its events are in %s; tarry report makes the page",
                *(self.path, type(error).__name__, error, self.events_path),
            )

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __str__(self) -> str:
        if self.active:
            events.flush()
            self._recorder.flush()
        return summary([read(self.events_path)])

    def _repr_html_(self) -> str:
        """In a notebook: the page itself."""
        text = self.write().read_text(encoding="utf-8")
        style = "width:100%;height:720px;border:1px solid #8886"
        return f'<iframe style="{style}" sandbox="allow-scripts allow-downloads" srcdoc="{html.escape(text)}"></iframe>'


def _of_rank(path: Path) -> Path:
    """Each process of a distributed run has files of its own."""
    return path.with_suffix(f".rank{_rank()}{path.suffix}") if _world_size() > 1 else path


def _rank() -> int:
    return int(os.environ.get("RANK") or 0)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)


def _header(versions: Mapping[str, str], counters: Mapping[str, float]) -> dict[str, Any]:
    return {
        "tarry_events": VERSION,
        **versions,
        "python": ".".join(map(str, sys.version_info[:3])),
        "command": sys.argv,
        "folder": os.getcwd(),
        "pid": os.getpid(),
        "rank": _rank(),
        "world_size": _world_size(),
        "started": time.time(),
        "before": dict(counters),
    }
