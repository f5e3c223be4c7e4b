"""Writes events to a file as they happen: JSON lines (`format.py`), in a form that survives the end of the process.

The thread on which an event happens only puts it into a queue. A thread of the recorder's own turns what is queued into
text and writes it several times a second, straight to the system: a process that is killed loses the last fraction of a
second, and perhaps the end of a line. Graphs are written by that thread too, a few nodes at a time, so that the program
keeps the interpreter.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tarry.events import FIELDS, KINDS, Event
from tarry.events import flush as take_logged
from tarry.reports.format import hexadecimal

INTERVAL = 0.2
"""Seconds between two writes: what is lost when the process is killed."""
MAX_QUEUED = 20_000
"""Events that wait to be written. The thread that finds more writes them itself."""
MAX_ROUTINE = 2_000_000
"""Events that are written of kinds that come with each step; about 300 MB."""
IDLENESS = 2.0
"""How long the recorder's thread pauses between two pieces of a graph, as a multiple of what a piece took."""
ROUTINE = frozenset({"sync", "transfer", "read", "collective", "replay", "replay_verified", "reference"})
"""Kinds of events that come with each step."""
LEFT_OUT = frozenset({"execute", "cache_hit"})
"""Kinds that say nothing that `sync` does not say."""

_log = logging.getLogger("tarry")

Encoder = Callable[[], Iterator[dict[str, Any] | None]]
"""Makes lines; None where it can pause."""


class Recorder:
    """A subscriber of `tarry.events`. Any thread may call it."""

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any], clock: float | None = None) -> None:
        self.path = os.fspath(path)
        self._start = time.perf_counter() if clock is None else clock
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._queue: deque[tuple[Event, int]] = deque()
        self._encoders: deque[Encoder] = deque()
        self._threads: dict[int, int] = {}  # by identity, which the system uses again, to the number of its name
        self._names: dict[str, int] = {}
        self._lock = threading.RLock()  # of the file: lines come from one thread at a time
        self._closing = threading.Event()
        self._work = threading.Event()
        self._routine = 0
        self.dropped = 0
        self.active = True
        remedies = {name: kind.remedy for name, kind in KINDS.items() if kind.remedy}
        self._write([dict(header), {"kind": "remedies", "of": remedies}])
        self._thread = threading.Thread(target=self._run, name="tarry-report", daemon=True)
        self._meet(threading.main_thread().ident or 0)  # first: readers know it by its number
        self._thread.start()
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _abandon(itself()))

    def __call__(self, event: Event) -> None:
        if self.active and event.kind not in LEFT_OUT:
            ident = event.thread
            if ident not in self._threads:
                self._meet(ident)
            self._queue.append((event, ident))
            if len(self._queue) > MAX_QUEUED:
                self.flush()

    def _meet(self, ident: int) -> None:
        """A thread that is new here. Threads of one name are one to a reader; those without a name compile."""
        name = next((thread.name for thread in threading.enumerate() if thread.ident == ident), "Dummy-")
        if name.startswith("Dummy-"):  # what Python calls a thread that it has not started itself
            name = "compiling"
        with self._lock:
            if name not in self._names:
                self._names[name] = len(self._names)
                self._write([{"kind": "thread", "thread": self._names[name], "name": name}])
            self._threads[ident] = self._names[name]

    def add(self, encoder: Encoder) -> None:
        """Have lines made and written, on the recorder's thread, when there is time."""
        if self.active:
            self._encoders.append(encoder)
            self._work.set()

    def flush(self) -> None:
        """Write what is queued."""
        with self._lock:
            lines: list[dict[str, Any]] = []
            for _ in range(len(self._queue)):
                event, ident = self._queue.popleft()
                if event.kind in ROUTINE:
                    self._routine += 1
                    if self._routine > MAX_ROUTINE:
                        self.dropped += 1
                        continue
                lines.append(self._line(event, ident))
            self._write(lines)

    def close(self, end: Mapping[str, Any]) -> None:
        """Write what is left, graphs too, and the last line."""
        if self._closing.is_set() or not self.active:
            return
        self._closing.set()
        self._work.set()
        self._thread.join()
        self.flush()
        at = round(time.perf_counter() - self._start, 6)
        self._write([{"kind": "end", "t": at, **end, "dropped": self.dropped}])
        self.active = False
        os.close(self._file)

    # ---- on the recorder's thread

    def _run(self) -> None:
        while self.active and not self._closing.is_set():
            self._work.wait(INTERVAL)
            self._work.clear()
            take_logged()  # comes back here
            self.flush()
            self._encode()
        self._encode()

    def _encode(self) -> None:
        """Make the lines of graphs, with pauses unless the process waits for them. Events come between them."""
        flushed = time.perf_counter()
        while self._encoders and self.active:
            encoder = self._encoders.popleft()
            began = time.thread_time()
            try:
                for line in encoder():
                    if line is not None:
                        self._write([line])
                    if not self._closing.is_set():
                        time.sleep(IDLENESS * (time.thread_time() - began))
                    began = time.thread_time()
                    if time.perf_counter() - flushed > INTERVAL:
                        self.flush()
                        flushed = time.perf_counter()
            except Exception:  # a graph that cannot be shown must not end the program, nor the recording
                _log.warning("tarry: report: a graph could not be written down", exc_info=True)

    def _line(self, event: Event, ident: int) -> dict[str, Any]:
        number = self._threads[ident]
        line = {"kind": event.kind, "t": round(event.time - self._start, 6), "thread": number}
        usual = KINDS[event.kind].remedy
        for name, value in event.fields.items():
            if name == "remedy":
                if value != usual:
                    line[name] = value
            elif value != FIELDS[name].default:
                line[name] = self._field(name, value)
        return line

    def _field(self, name: str, value: Any) -> Any:
        if name == "start":
            return round(value - self._start, 6)
        if name == "key" and isinstance(value, tuple):
            return hexadecimal(value)
        return round(value, 7) if isinstance(value, float) else value

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if not lines or not self.active:
            return
        data = memoryview("".join(f"{encode(line)}\n" for line in lines).encode())
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:
                self.active = False
                _log.warning("tarry: report: cannot write %s: %s. Nothing more is recorded.", self.path, error)


def _abandon(recorder: Recorder | None) -> None:
    """In the child of a fork: the file is the parent's."""
    if recorder is not None:
        recorder.active = False
        recorder._queue.clear()
        recorder._encoders.clear()


_encoder = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":"), default=str)


def encode(line: Mapping[str, Any]) -> str:
    """A line as JSON. What JSON has no form for becomes text; no character outside of ASCII is left as it is."""
    try:
        return _encoder.encode(line)
    except (ValueError, TypeError, RecursionError):
        return _encoder.encode(_plain(line))


def _plain(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if depth < 8 and isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < 8 and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in value]
    return str(value)
