"""From a graph to a computation: out of the store, from the worker process, or by the backend here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tarry import events
from tarry.backends.base import Backend, Computation, Recording, Run
from tarry.config import config
from tarry.errors import BackendError, Unsupported
from tarry.ir.graph import Graph
from tarry.ir.sizes import Symbols
from tarry.runtime import limits
from tarry.runtime.compile.jobs import yield_to_user
from tarry.runtime.compile.process import CannotError, CompileProcess
from tarry.runtime.compile.reasons import FIRST, reasons
from tarry.store import Identity, Store, identify, identify_note, identify_range

_stores: dict[tuple[str, int], Store] = {}


def store_for(backend: Backend) -> Store | None:
    """Where the backend's programs are kept, as the configuration says now; None if they cannot leave the process."""
    if not config.store or not _is_portable(backend):
        return None
    location = (str(config.cache_dir), config.max_stored_bytes)
    if location not in _stores:
        _stores[location] = Store(config.cache_dir / "programs", config.max_stored_bytes)
    return _stores[location]


def _is_portable(backend: Backend) -> bool:
    """Whether the backend's programs can leave the process."""
    return type(backend).load is not Backend.load


def is_family_stored(backend: Backend, outline: tuple[int, int]) -> bool:
    """Whether a program was stored for steps of this outline whose sizes vary, perhaps of another version or for
    another machine. It takes no graph to find that out."""
    store = store_for(backend)
    return store is not None and store.has(_note(backend, outline))


def note_family(backend: Backend, outline: tuple[int, int]) -> None:
    """There is such a program now."""
    store = store_for(backend)
    if store is not None and not store.has(note := _note(backend, outline)):
        store.put(note, b"")


def _note(backend: Backend, outline: tuple[int, int]) -> Identity:
    return identify_note(f"steps of outline {outline}", backend.name)


@dataclass(frozen=True)
class Sizes:
    """Of a graph whose sizes vary: the values of the symbols that it is written down at, and those that its program is
    wanted for."""

    exemplary: Symbols
    wanted: Symbols


class Build:
    """Makes the computations of one step, which may be several, and counts where they came from."""

    def __init__(
        self,
        backend: Backend,
        recording: Recording,
        process: CompileProcess | None = None,
        stages: dict[str, Graph] | None = None,
    ) -> None:
        """`process`: where to compile, if not here. `stages`: where to keep the graph at each stage, if anywhere."""
        self.backend = backend
        self.recording = recording
        self._process = process
        self.stages = stages
        self.text: Callable[[], str] | None = None
        """What makes the text of the program."""
        self.reason = ""  # why there is no program yet
        self.announced = False
        self.compiled = 0
        self.loaded = 0
        self._made: dict[Graph, Computation] = {}  # by graph without lines

    @property
    def origin(self) -> str:
        """Where the program came from: a word for reports."""
        if self.compiled and self.loaded:
            return "mixed"
        return "stored" if self.loaded else "compiled"

    def keep(self, stage: str, graph: Graph) -> None:
        """Have a graph shown in reports, as one more stage."""
        if self.stages is not None:
            self.stages[stage] = graph

    def described(self) -> dict[str, Any]:
        """What is compiled, why and where, as fields of an event."""
        return {
            "operations": self.recording.num_operations,
            "again": bool(self.reason),
            "reason": self.reason or FIRST,
            "background": self._process is not None,
            "backend": self.backend.name,
            "lines": self.recording.lines,
            **self.recording.place,
        }

    def announce(self, reason: str) -> None:
        """Print why something is compiled."""
        self.announced = True
        reasons.say(reason, self.recording.lines, self.recording.num_operations)

    def computation(self, graph: Graph, sizes: Sizes | None = None) -> Computation:
        """The computation of a graph: one for all that are equal. `sizes`: of one whose sizes vary."""
        if sizes is not None:
            return self._found_or_made(graph, sizes)
        alike = replace(graph, nodes=tuple(replace(node, site=None) for node in graph.nodes))
        if alike not in self._made:
            self._made[alike] = self._found_or_made(graph, None)
        return self._made[alike]

    def _found_or_made(self, graph: Graph, sizes: Sizes | None) -> Computation:
        store = store_for(self.backend)
        found, free = (None, None) if store is None else self._look_up(store, graph, sizes)
        if store is None or free is None:
            return found or self._make(graph, sizes)[0]
        with store.claim(free, limits.CLAIM_SECONDS, self.recording.place):
            if store.has(free):  # another process has made it meanwhile
                found, free = self._look_up(store, graph, sizes)
            if found is not None:
                return found
            made, artifact = self._make(graph, sizes)
            if free is not None and (artifact := artifact or self._artifact(made)) is not None:
                store.put(free, artifact, self.recording.place)
            return made

    def _make(self, graph: Graph, sizes: Sizes | None) -> tuple[Computation, bytes | None]:
        """The computation of a graph for which there is no program, and the program that came from the worker."""
        if not self.announced:
            self.announce(self.reason)
        if not self.compiled:
            events.emit("compiling", **self.described())
        self.compiled += 1
        remote = self._compile_elsewhere(graph, sizes)
        return (self._compile_here(graph, sizes) if remote is None else self._loaded(graph, remote)), remote

    def _look_up(self, store: Store, graph: Graph, sizes: Sizes | None) -> tuple[Computation | None, Identity | None]:
        """The stored program, or where to keep the one that has to be compiled, if there is room for it."""
        for number in range(1 if sizes is None else limits.MAX_RANGES):
            name = (graph, self.backend.name, self._fingerprint)
            identity = identify(*name) if sizes is None else identify_range(*name, number)
            yield_to_user()
            found = self._stored(store, identity, graph)
            yield_to_user()
            if found is None:
                return None, identity
            if sizes is None or found.accepts is None or found.accepts(sizes.wanted):
                self.loaded += 1
                return found, None
        return None, None

    @cached_property
    def _fingerprint(self) -> str:
        return self.backend.fingerprint()

    def _stored(self, store: Store, identity: Identity, graph: Graph) -> Computation | None:
        data = store.get(identity, self.recording.place)
        if data is None:
            return None
        try:
            return self._loaded(graph, data)
        except Exception as error:
            store.reject(identity, f"{type(error).__name__}: {error}", self.recording.place)
            return None

    def _loaded(self, graph: Graph, data: bytes) -> Computation:
        return checked(self.backend, graph, self.backend.load(graph, data))

    def _compile_elsewhere(self, graph: Graph, sizes: Sizes | None) -> bytes | None:
        if self._process is None or not _is_portable(self.backend):
            return None
        try:
            return self._process.compile(self.backend, graph, None if sizes is None else sizes.exemplary)
        except CannotError as error:
            events.emit("compile_here", backend=self.backend.name, reason=str(error), **self.recording.place)
            return None

    def _compile_here(self, graph: Graph, sizes: Sizes | None) -> Computation:
        backend = self.backend
        made = backend.compile(graph) if sizes is None else backend.compile_symbolic(graph, sizes.exemplary)
        return checked(backend, graph, made)

    def _artifact(self, made: Computation) -> bytes | None:
        """The program as bytes. One that cannot be stored is as good as any in this process."""
        try:
            return None if made.artifact is None else made.artifact()
        except Exception as error:
            reason = error.reason if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
            events.emit("store_skip", backend=self.backend.name, reason=reason, **self.recording.place)
            return None


def checked(backend: Backend, graph: Graph, made: Computation | Run) -> Computation:
    """What a backend has made of a graph, if it can be what it says it is."""
    if not isinstance(made, Computation):
        if not callable(made):
            raise BackendError(f"backend {backend.name!r}: compile(graph) gave {made!r}, which cannot be called")
        return Computation(made, graph)
    # The runtime may have taken an entry out of `replaces`: an update there would not be safe.
    for k in made.in_place:
        if not 0 <= k < len(graph.replaces) or graph.replaces[k] is None:
            raise BackendError(
                f"backend {backend.name!r}: output {k} is among its in_place, but graph.replaces has no input for it"
            )
    return made
