"""What the runtime knows of a graph: one entry per structure, with one explicit state.

The same class serves three kinds of things that are compiled, or not, by the same rules (`decide.py`): a graph at fixed
sizes (in `EntryCache`), a range of sizes (`sizes/families.py`), and a set of constants of either (`variants.py`).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from tarry import events, places
from tarry.backends.base import Batch
from tarry.config import config
from tarry.errors import FallbackError
from tarry.ir.sizes import Symbols
from tarry.native import C
from tarry.runtime.compile.jobs import Job
from tarry.runtime.pace import Pace

T = TypeVar("T")
E = TypeVar("E", bound="Entry[Any]")


class State(Enum):
    """How far a graph has come on its way to a program."""

    NEW = "new"
    """It has not come often enough to be worth a program: many graphs come once."""
    SEEN = "seen"
    """It has come often enough: a program is made when it comes next."""
    COMPILING = "compiling"
    """A job in the background makes its program. The reference path computes its batches."""
    READY = "ready"
    """It has a program."""
    REFUSED = "refused"
    """It gets no program, for a reason that is kept. The reference path computes its batches."""


_CLOSED = (State.READY, State.COMPILING, State.REFUSED)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a batch runs on the reference path."""

    text: str
    unsupported: bool = False
    """The backend cannot compile it: counted as `interpreted`, not as `reference`, and an error if
    `tarry.config.fallback` is "error"."""

    def run(self, batch: Batch, symbols: Symbols = ()) -> None:
        """Run a batch on the reference path for this reason."""
        if self.unsupported and config.fallback == "error":
            raise FallbackError(
                f"a step has to run on the reference path: {self.text}; and tarry.config.fallback is 'error'. Avoid it "
                f"there, or set tarry.config.fallback = 'allow'."
            )
        kind = "interpreted" if self.unsupported else "reference"
        events.emit(kind, key=batch.key, reason=self.text, **places.of_caller())
        batch.interpret(interruptible=False)


@dataclass(eq=False, slots=True)
class Entry(Generic[T]):
    """Something that is compiled as a whole, into a `T`. Changed under the runtime's lock only."""

    state: State = State.NEW
    made: T | None = None  # when READY
    reason: Reason | None = None  # when REFUSED
    job: Job[T | Reason] | None = None  # when COMPILING
    pace: Pace = field(default_factory=Pace)
    prepared: bool = False
    """The backend takes such steps as they were recorded: there is nothing to compile, under any policy."""

    @property
    def is_open(self) -> bool:
        """Whether a program may still be asked for: none is there, none is being made, none was refused."""
        return self.state not in _CLOSED

    def begin(self, job: Job[T | Reason]) -> None:
        """A job makes the program."""
        self.state, self.job = State.COMPILING, job

    def settle(self, made: T | Reason) -> None:
        """The program is there, or it is certain that there will be none."""
        self.job = None
        if isinstance(made, Reason):
            self.state, self.reason = State.REFUSED, made
        else:
            self.state, self.made = State.READY, made

    def finish(self) -> T | Reason | None:
        """Take the outcome of a job that is done; None if it was stopped, so that it may be begun again. Warns if the
        job has failed."""
        job = self.job
        assert job is not None
        if job.stopped:
            self.state, self.job = State.SEEN, None
            return None
        made = job.result
        if made is None:
            made = Reason(_why_failed(job.error))
            warnings.warn(f"tarry: {made.text}. tarry keeps using the reference path.", stacklevel=2)
        self.settle(made)
        return made


def _why_failed(error: BaseException | None) -> str:
    message = (str(error).strip().splitlines() or [repr(error)])[0]
    notes = [note.partition(";")[0] for note in getattr(error, "__notes__", ()) if note.startswith("while")]
    return f"compiling in the background failed: {message}{''.join(f' ({note})' for note in notes)}"


class EntryCache(Generic[E]):
    """Entries by the hash of their graph. One hash may have several: it may collide, but an entry must not be taken for
    another, so the structure is compared. The least recently used ones go first.

    Some are served by the native part, which has a table of its own (csrc/execute/serve.h)."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[int, int], list[tuple[C.Structure, E]]] = OrderedDict()
        self._size = 0
        self._served: dict[E, list[object]] = {}

    def find(self, batch: Batch) -> E | None:
        """The entry of a batch's structure."""
        key = batch.key
        bucket = self._buckets.get(key)
        if bucket is None:
            return None
        self._buckets.move_to_end(key)
        for structure, entry in bucket:
            if batch.matches(structure):
                return entry
        return None

    def add(self, batch: Batch, entry: E) -> E:
        """Keep an entry for batches of this structure."""
        self._buckets.setdefault(batch.key, []).append((batch.structure(), entry))
        self._size += 1
        while self._size > config.max_cached_programs and len(self._buckets) > 1:
            key, bucket = next(iter(self._buckets.items()))
            if any(C.was_served(structure) for structure, _ in bucket):
                self._buckets.move_to_end(key)  # it was used, unseen by find()
                continue
            for structure, gone in self._buckets.pop(key):
                C.forget_program(structure)
                self._served.pop(gone, None)
            self._size -= len(bucket)
        return entry

    def register(self, key: tuple[int, int], entry: E, program: object, add: Callable[[C.Structure], None]) -> None:
        """Register a program of an entry with the native part, once, so that it runs the program by itself."""
        served = self._served.setdefault(entry, [])
        if program not in served:
            for structure, other in self._buckets.get(key, ()):
                if other is entry:
                    served.append(program)
                    add(structure)

    def register_reference(self, key: tuple[int, int], entry: E) -> None:
        """Have the native part compute batches of an entry by the reference path, until a job is done."""
        for structure, other in self._buckets.get(key, ()):
            if other is entry:
                C.remember_reference(structure)

    def forget_served(self) -> None:
        """Have no program served by the native part."""
        C.forget_programs()
        self._served.clear()

    def clear(self) -> None:
        """Forget all entries."""
        self.forget_served()
        self._buckets.clear()
        self._size = 0

    def __len__(self) -> int:
        return self._size
