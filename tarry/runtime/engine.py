"""Computes batches: look up what is known of the graph, decide what to do (`decide.py`), do it. Read `Engine.compute`.

All effects on entries happen here, on the thread that computes, under the runtime's lock. A job in the background only
makes a program; the batch that finds its job done takes the program over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, TypeAlias, TypeVar

from tarry import events, places
from tarry.backends.base import Backend, Batch, Policy, Recording
from tarry.config import config
from tarry.ir.sizes import Symbols
from tarry.native import C
from tarry.runtime import limits
from tarry.runtime.compile.compiler import Compiler
from tarry.runtime.compile.observe import show_taken
from tarry.runtime.compile.process import StoppedError
from tarry.runtime.compile.reasons import FIRST
from tarry.runtime.decide import (
    COMPILING,
    NEVER,
    NEW,
    NO_FACTS,
    PARTIAL,
    QUEUE_FULL,
    SMALL,
    SWITCHED,
    CompileNow,
    Facts,
    Interpret,
    RefuseRecompile,
    Run,
    Submit,
    decide,
)
from tarry.runtime.dispatch import isolated, on_device, profiled
from tarry.runtime.entry import Entry, EntryCache, Reason, State
from tarry.runtime.program import Program
from tarry.runtime.sizes.families import Families, Family, GraphEntry, SizedRecording
from tarry.runtime.sizes.sites import Sites
from tarry.runtime.variants import Variant, Variants

Made: TypeAlias = Variants | Variant
Path: TypeAlias = Literal["reference", "compiled", "native"]
CHUNK = "chunk"
"""Why the recorder cuts a step that is computed in chunks."""
T = TypeVar("T")


@dataclass(slots=True)
class Found:
    """What a look-up has found for a batch: the entry to decide about, and what to run if it is READY."""

    entry: Entry[Any]
    family: Family | None = None
    program: Program | Reason | None = None
    symbols: Symbols | None = None
    """The sizes of the batch, if the entry is a range of sizes of a family."""
    variants: Variants | None = None
    """The programs of the graph, if the entry is a set of constants that none of them takes."""
    certain: bool = False  # a fact, see decide.py


class Engine:
    """All that is known of graphs of one device. Another device's programs are its own, if its graphs are the same."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self._entries: EntryCache[GraphEntry] = EntryCache()
        self._families = Families()
        self._sites = Sites()
        self.path: Path = "reference"
        """What has computed the last batch."""
        self.execute_seconds = 0.0
        """And what that took."""
        self._in_chunks: tuple[GraphEntry, int] | None = None
        """Whose job is waited for, and on which device, while steps are computed in chunks."""
        self._within_step = False
        """Whether a chunk of the step that is being recorded was computed."""

    def forget_served(self) -> None:
        """Have the native part run no program by itself: what is decided about graphs may be another thing now."""
        self._end_chunks()
        self._entries.forget_served()

    def clear(self) -> None:
        """Forget all graphs: another backend comes."""
        self._end_chunks()
        self._entries.clear()
        self._families.clear()
        self._sites.clear()

    def compute(self, backend: Backend, batch: Batch, why_cut: str) -> None:
        """Compute a batch: by its program, without one, or by one that has to be compiled first."""
        if not batch.switches_are_set():
            # A program would compute under those that are set now.
            self._execute(backend, SWITCHED.run, "reference", batch)
            return
        policy = self.compiler.policy(backend)
        if batch.is_partial:
            self._execute(backend, PARTIAL.run, "reference", batch)
            return
        if batch.is_small:  # the native part leaves it to Python where a subscriber has to see each step
            self._execute(backend, (NEVER if policy == "never" else SMALL).run, "reference", batch)
            return
        if self._in_chunks is not None and (why_cut == CHUNK or self._within_step):
            self._compute_chunk(backend, batch, self._in_chunks[0], why_cut)
            return
        found = self._look_up(backend, batch, policy)
        while True:  # a second time after CompileNow, a third time if that came to nothing for a range of sizes
            entry = found.entry
            facts = self._facts(found, batch, policy) if entry.is_open and policy != "never" else NO_FACTS
            match decide(entry, facts, policy):
                case Run():
                    program: Any = entry.made if found.program is None else found.program.run
                    key = batch.key
                    self._execute(backend, program, _path(found.program), batch, found.symbols)
                    if entry.pace.is_measured:
                        entry.pace.with_program()
                    elif isinstance(entry, GraphEntry) and isinstance(found.program, Program):
                        self._register(key, entry, found.program)
                    return
                case Interpret(reason):
                    key = batch.key
                    self._interpret(backend, found, batch, reason)
                    self._register_reference(key, found)
                    return
                case Submit():
                    work = _under_these_switches(self._work(backend, found, batch, background=True))
                    entry.begin(self.compiler.submit(work))
                    if found.variants is not None:
                        found.variants.compiling = entry
                    self._interpret(backend, found, batch, COMPILING)
                    return
                case CompileNow():
                    found = self._compile_now(backend, found, batch)
                case RefuseRecompile():
                    if found.variants is not None:
                        raise self.compiler.no_recompile.error(found.variants.why(batch.numbers()))
                    raise self.compiler.recompile_error(batch)

    def text(self, backend: Backend, batch: Batch) -> str | None:
        """What the backend makes of a batch's graph, as text; None if it takes it as it was recorded. Compiles it, runs
        nothing."""
        recording = Recording(batch)
        if backend.prepare(recording) is not None:
            return None
        made = isolated(lambda: self.compiler.compile_graph(backend, recording.take(), background=False))
        return None if isinstance(made, Reason) else made.text()

    def _register(self, key: tuple[int, int], entry: GraphEntry, program: Program) -> None:
        """Have the native part run a program by itself, if it can: `decide` says to run it whenever its graph comes."""
        variants = entry.made
        if program.servable and isinstance(variants, Variants):
            constants = variants.constants(program)
            self._entries.register(key, entry, program, lambda structure: program.register(structure, constants))

    def _register_reference(self, key: tuple[int, int], found: Found) -> None:
        """Have the native part interpret a graph by itself while `decide` cannot say anything else."""
        entry = found.entry
        if not isinstance(entry, GraphEntry):  # the native part compares structures, not numbers or ranges of sizes
            return
        if self._in_chunks is not None:  # the last chunk of a step must come to Python, whatever it looks like
            return
        refused = entry.state is State.REFUSED and entry.reason is not None and not entry.reason.unsupported
        compiling = entry.job is not None and entry.state is State.COMPILING and entry.pace.is_known
        if refused or compiling:
            self._entries.register_reference(key, entry)
            if entry.job is not None and entry.job.done:  # it was done before the native part was told
                C.withdraw_references()

    # ---- looking up

    def _look_up(self, backend: Backend, batch: Batch, policy: Policy) -> Found:
        """What is known of a batch's graph: its own entry if that has or gets a program, else one for several sizes."""
        entry = self._entries.find(batch)
        if entry is not None and entry.state is State.READY:
            events.emit("cache_hit")
        if entry is not None and (entry.own_sizes or not entry.is_open):
            return self._at_own_sizes(entry, batch)
        outline = batch.outline()
        family = self._families.find(outline)
        if family is not None and family.prepared is not None:
            events.emit("cache_hit")
            return Found(family.prepared)
        symbols = None if family is None else family.symbols(outline)
        if symbols and family is not None and family.ready:
            events.emit("cache_hit")
        if entry is None and symbols is None:
            prepared = self._meet(backend, batch, family, outline, policy)
            if prepared is not None:
                return Found(prepared)
            symbols = None if family is None else family.symbols(outline)
        if symbols is not None:
            assert family is not None
            if not symbols:  # no template yet
                if policy == "never" or (policy == "background" and family.seconds < limits.FAMILY_SECONDS):
                    return Found(Entry(), family, symbols=())
                symbols = family.find_template(outline, batch.numbers())
            if symbols is not None:
                return self._at_sizes(backend, batch, family, symbols) or self._alone(batch, family)
        return self._at_own_sizes(entry or self._entries.add(batch, GraphEntry(family=family)), batch)

    def _meet(
        self, backend: Backend, batch: Batch, family: Family | None, outline: C.Outline, policy: Policy
    ) -> GraphEntry | None:
        """Take note of a graph that comes for the first time. Its entry, if the backend takes it as it was recorded."""
        if policy != "never" and self.compiler.no_recompile.active:
            raise self.compiler.recompile_error(batch)
        start = perf_counter()
        step = backend.prepare(Recording(batch))
        if step is None:
            if family is not None and backend.capabilities.symbolic_sizes and config.symbolic_sizes:
                family.meet(outline, batch.numbers())
            return None
        events.emit(
            "compile",
            backend=backend.name,
            key=batch.key,
            operations=batch.num_operations,
            seconds=perf_counter() - start,
            again=False,
            reason=FIRST,
            **places.of_caller(),
        )
        show_taken(self.compiler.observer, backend, Recording(batch), perf_counter() - start)
        if family is None:
            return self._entries.add(batch, GraphEntry(State.READY, step, prepared=True))
        family.prepared = GraphEntry(State.READY, step, prepared=True)
        return family.prepared

    def _at_own_sizes(self, entry: GraphEntry, batch: Batch) -> Found:
        """What is known of a graph at its own sizes."""
        if entry.job is not None and entry.job.done:
            self._take_over(Found(entry, entry.family))
        over_budget = entry.family.over_budget(batch) if entry.family is not None and entry.is_open else None
        if over_budget is not None:
            entry.settle(over_budget)
        if entry.state is not State.READY or entry.prepared:
            return Found(entry, entry.family)
        variants = entry.made
        assert isinstance(variants, Variants)
        if variants.unguarded is not None:
            return Found(entry, None, variants.unguarded)
        found = self._at_numbers(entry, entry.family, variants, batch)
        assert found is not None
        return found

    def _alone(self, batch: Batch, family: Family | None) -> Found:
        """What is known of a graph at its own sizes, if no program for several sizes is right for it."""
        entry = self._entries.find(batch) or self._entries.add(batch, GraphEntry(family=family))
        entry.own_sizes = True
        return self._at_own_sizes(entry, batch)

    def _at_sizes(self, backend: Backend, batch: Batch, family: Family, symbols: Symbols) -> Found | None:
        """What is known of a range of sizes that a batch is in; None if it has to have a program of its own."""
        last = family.ranges[-1] if family.ranges else None
        taken_over = last is not None and last.job is not None and last.job.done
        if last is not None and taken_over:
            self._take_over(Found(last, family, symbols=symbols))
        for ready in family.ranges:
            found = None if ready.made is None else self._at_numbers(ready, family, ready.made, batch, symbols)
            if found is not None:
                return found
        # If the program is not right that was just made, another one would not be either.
        entry = None if taken_over else family.open_range()
        if entry is None:
            return None
        if entry.state is State.NEW and family.is_due(backend):
            entry.state = State.SEEN
        return Found(entry, family, symbols=symbols)

    def _at_numbers(
        self,
        entry: Entry[Any],
        family: Family | None,
        variants: Variants,
        batch: Batch,
        symbols: Symbols | None = None,
    ) -> Found | None:
        """Of a graph with programs, the one for a batch's numbers, or else what is known of these numbers; None if none
        is right for its sizes."""
        numbers = batch.numbers()
        program = variants.find(numbers)
        compiling = variants.compiling
        if program is None and compiling is not None and compiling.job is not None and compiling.job.done:
            self._take_over(Found(compiling, variants=variants))
            program = variants.find(numbers)
        if symbols is not None and not variants.accept(program, symbols):
            return None
        if program is not None:
            return Found(entry, family, program, symbols)
        constants, certain = variants.entry(numbers)
        return Found(constants, family, None, symbols, variants, certain)

    def _facts(self, found: Found, batch: Batch, policy: Policy) -> Facts:
        reason = QUEUE_FULL if policy == "background" and self.compiler.queue_full else None
        if isinstance(found.entry, GraphEntry):
            reason = self._sites.over_budget(batch) or reason
        return Facts(self.compiler.no_recompile.active, reason, found.certain)

    # ---- compiling

    def _work(self, backend: Backend, found: Found, batch: Batch, *, background: bool) -> Callable[[], Made | Reason]:
        """What makes the program of an entry. Takes what it needs of the batch now."""
        compiler, recording = self.compiler, Recording(batch)
        place = places.here()
        work: Callable[[], Made | Reason]
        if found.variants is not None:
            variants = found.variants
            why = variants.why(recording.take().numbers)
            work = lambda: compiler.compile_constants(backend, recording, background, variants, why)  # noqa: E731
        elif found.symbols is not None:
            assert found.family is not None
            recording = sized = SizedRecording(batch, found.family, found.symbols)
            work = lambda: compiler.compile_sizes(backend, sized, background)  # noqa: E731
        else:
            self._sites.count(batch)
            recording.take()
            work = lambda: compiler.compile_graph(backend, recording, background)  # noqa: E731
        recording.place = place
        found.entry.pace.recording, found.entry.pace.backend = recording, backend.name
        return work

    def _compile_now(self, backend: Backend, found: Found, batch: Batch) -> Found:
        """Have an entry compiled, and wait for it. What to decide about next. The batch is not looked up again: another
        thread may have changed meanwhile which of its results are needed, and with them its structure."""
        entry, symbols = found.entry, found.symbols
        if entry.job is not None:
            entry.job.wait()
            self._take_over(found)
        else:
            made = profiled("tarry::compile", isolated, self._work(backend, found, batch, background=False))
            entry.settle(made)
            self._settled(found, made)
        if isinstance(entry, GraphEntry):
            return self._at_own_sizes(entry, batch)
        variants = found.variants or entry.made
        next_ = None if variants is None else self._at_numbers(entry, found.family, variants, batch, symbols)
        return next_ or self._alone(batch, found.family)

    def _take_over(self, found: Found) -> None:
        """Take the outcome of a job that is done."""
        job = found.entry.job
        made = found.entry.finish()
        if made is not None:
            if job is not None and found.variants is None and not isinstance(made, Reason):
                found.entry.pace.take_over(job.seconds)
            self._settled(found, made)
        elif found.variants is not None:
            found.variants.compiling = None

    def _settled(self, found: Found, made: Made | Reason) -> None:
        """What follows for others from what has come of an entry."""
        family = found.family
        if found.variants is not None:
            found.variants.compiling = None
            if isinstance(made, Variant):
                found.variants.add(made)
        elif found.symbols is not None:
            if isinstance(made, Reason) and family is not None and len(family.ranges) == 1:
                family.give_up()
        elif isinstance(made, Reason):
            if made.unsupported:
                warnings.warn(f"tarry: {made.text}. It runs on the reference path.", stacklevel=2)
        elif family is not None:
            family.fixed += 1

    # ---- running

    def _execute(
        self, backend: Backend, run: Callable[..., None], path: Path, batch: Batch, symbols: Symbols | None = None
    ) -> None:
        """Run something that computes a batch; with its time, or its error, as an event."""
        start = perf_counter()
        try:
            if symbols:
                profiled("tarry::execute", on_device, run, batch, symbols)
            else:
                profiled("tarry::execute", on_device, run, batch)
        except BaseException as error:
            events.emit("error", stage="execute", backend=backend.name, error=repr(error), **places.of_caller())
            raise
        self.path, self.execute_seconds = path, perf_counter() - start
        events.emit("execute", seconds=self.execute_seconds)

    def _interpret(self, backend: Backend, found: Found, batch: Batch, reason: Reason) -> None:
        start = perf_counter()
        batch.by_reference = reason is not NEW or (found.variants is not None and found.variants.has_met_many)
        self._execute(backend, reason.run, "reference", batch)
        if reason is NEVER:
            return
        if found.symbols is not None and found.variants is None:
            assert found.family is not None
            found.family.runs += 1
            found.family.seconds += perf_counter() - start
        elif reason is NEW:
            found.entry.state = State.SEEN
        if reason is NEW or reason is COMPILING:
            found.entry.pace.without_program()
        if reason is COMPILING and isinstance(found.entry, GraphEntry):
            self._begin_chunks(backend, found.entry, batch)

    # ---- steps in chunks

    def _begin_chunks(self, backend: Backend, entry: GraphEntry, batch: Batch) -> None:
        """The reference path computes the steps of this graph until its job is done. It begins when a step is complete;
        a device of its own would be idle while the next one is recorded, and eager PyTorch's is not. So have steps cut
        into chunks, each launched when it is recorded. A chunk is looked up nowhere, and leaves no entry."""
        operations = batch.num_operations
        if (
            operations >= 2 * limits.CHUNK_OPERATIONS
            and backend.is_asynchronous
            and not backend.capabilities.opaque_data
        ):
            self._in_chunks = entry, batch.device
            C.withdraw_references()
            C.set_chunks(batch.device, limits.CHUNK_OPERATIONS)

    def _compute_chunk(self, backend: Backend, batch: Batch, entry: GraphEntry, why_cut: str) -> None:
        self._within_step = why_cut == CHUNK
        self._execute(backend, COMPILING.run, "reference", batch)
        if not self._within_step:
            entry.pace.without_program()
            if entry.job is None or entry.job.done:
                self._end_chunks()  # so that the next step is complete when it is looked up

    def _end_chunks(self) -> None:
        if self._in_chunks is not None:
            C.set_chunks(self._in_chunks[1], 0)
            self._in_chunks, self._within_step = None, False


def _path(program: Program | Reason | None) -> Path:
    """What computes a batch that has this program; None: the backend's own way (`Backend.prepare`)."""
    if isinstance(program, Reason):
        return "reference"
    return "native" if program is not None and program.is_native else "compiled"


def _under_these_switches(work: Callable[[], T]) -> Callable[[], T]:
    """The same work, broken off to be begun again if a global switch of PyTorch's changes before it is done: the
    default dtype decides what is computed."""
    switches = C.current_switches()

    def guarded() -> T:
        made = None if C.current_switches() != switches else work()
        if made is None or C.current_switches() != switches:
            raise StoppedError
        return made

    return guarded
