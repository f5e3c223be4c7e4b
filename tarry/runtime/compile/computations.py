"""From a graph to a computation: out of the store, from the worker process, or by the backend here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
        """The computation of a graph. `sizes`: of one whose sizes vary."""
        (made,) = self.computations([graph]) if sizes is None else self._found_or_made([graph], sizes)
        return made

    def computations(self, graphs: Sequence[Graph]) -> list[Computation]:
        """The computations of several graphs, one for all that are equal."""
        alike = [replace(graph, nodes=tuple(replace(node, site=None) for node in graph.nodes)) for graph in graphs]
        new = dict(zip(alike, graphs, strict=True))
        for known in self._made.keys() & new.keys():
            del new[known]
        self._made.update(zip(new, self._found_or_made(list(new.values()), None), strict=True))
        return [self._made[graph] for graph in alike]

    def _found_or_made(self, graphs: Sequence[Graph], sizes: Sizes | None) -> list[Computation]:
        """Computations out of the store; those that it does not have are made together, and kept there."""
        store = store_for(self.backend)
        if store is None:
            return self._make(graphs, sizes)[0]
        looked_up = [self._look_up(store, graph, sizes) for graph in graphs]
        made = {k: found for k, (found, _) in enumerate(looked_up) if found is not None}
        free = {k: identity for k, (found, identity) in enumerate(looked_up) if found is None and identity is not None}
        with ExitStack() as claims:
            # In an order that all processes have, so that no two wait for each other.
            for k, identity in sorted(free.items(), key=lambda item: item[1].key):
                claims.enter_context(store.claim(identity, limits.CLAIM_SECONDS, self.recording.place))
                if store.has(identity):  # another process has made it meanwhile
                    found, _ = self._look_up(store, graphs[k], sizes)
                    made |= {} if found is None else {k: found}
            missing = [k for k in range(len(graphs)) if k not in made]
            computations, artifacts = self._make([graphs[k] for k in missing], sizes)
            for k, computation, artifact in zip(missing, computations, artifacts, strict=True):
                made[k] = computation
                if k in free and (data := artifact or self._artifact(computation)) is not None:
                    store.put(free[k], data, self.recording.place)
        return [made[k] for k in range(len(graphs))]

    def _make(self, graphs: Sequence[Graph], sizes: Sizes | None) -> tuple[list[Computation], Sequence[bytes | None]]:
        """The computations of graphs for which there is no program, and the programs that came from the worker."""
        if not graphs:
            return [], []
        if not self.announced:
            self.announce(self.reason)
        if not self.compiled:
            events.emit("compiling", **self.described())
        self.compiled += len(graphs)
        remote = self._compile_elsewhere(graphs, sizes)
        if remote is None:
            return self._compile_here(graphs, sizes), [None] * len(graphs)
        return [self._loaded(graph, data) for graph, data in zip(graphs, remote, strict=True)], remote

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

    def _compile_elsewhere(self, graphs: Sequence[Graph], sizes: Sizes | None) -> list[bytes] | None:
        if self._process is None or not _is_portable(self.backend):
            return None
        try:
            return self._process.compile(self.backend, graphs, None if sizes is None else sizes.exemplary)
        except CannotError as error:
            events.emit("compile_here", backend=self.backend.name, reason=str(error), **self.recording.place)
            return None

    def _compile_here(self, graphs: Sequence[Graph], sizes: Sizes | None) -> list[Computation]:
        backend = self.backend
        if sizes is None:
            made = backend.compile_all(graphs)
        else:
            made = [backend.compile_symbolic(graph, sizes.exemplary) for graph in graphs]
        return [checked(backend, graph, each) for graph, each in zip(graphs, made, strict=True)]

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
