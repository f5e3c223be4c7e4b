"""A compiled program: from a recorded batch to the backend's function and back to the storages.

What is the same for all backends is here: data of their own, operators that they do not know, the check of their
results, and what their faults are turned into. A backend only sees graphs, data and numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from time import perf_counter
from typing import Any

import torch

from tarry import events, places
from tarry.backends.base import Backend, Batch, Computation, PythonNumber, Run
from tarry.backends.partition import Part, compiles, partition
from tarry.config import config
from tarry.errors import BackendError, CollectiveError, FallbackError
from tarry.ir.evaluate import run_node
from tarry.ir.graph import Graph, Node, Value, producers, unread
from tarry.ir.operators import COLLECTIVES
from tarry.ir.sizes import Symbols
from tarry.ir.text import node_text
from tarry.native import C
from tarry.passes.split import Split
from tarry.runtime.compile.composed import compile_graph, compile_graphs
from tarry.runtime.compile.computations import Build, Sizes
from tarry.runtime.data import as_typed, converts, empty, opaque_inputs, opaque_results
from tarry.runtime.dispatch import PlainDispatch, uninterrupted

_UNGUARDED: AbstractContextManager[None] = nullcontext()


class Program:
    """A compiled program, in parts if the backend does not know all its operators."""

    def __init__(
        self, backend: Backend, graph: Graph, build: Build, *, sizes: Sizes | None = None, parts: Split | None = None
    ) -> None:
        """`sizes`: of a graph whose sizes vary. `parts`: of one that is compiled in two parts."""
        self._backend = backend
        self._graph = graph
        self._what = build.recording.describe()
        self._opaque = backend.capabilities.opaque_data
        self._converts = not self._opaque and converts(backend)
        on_device = [node for node in graph.nodes if not compiles(backend, node)]
        self._unknown = [node for node in on_device if node.op not in COLLECTIVES]
        self._inputs = frozenset(graph.inputs)
        self._whole: Computation | None = None
        self._parts: list[tuple[Part, Computation | None]] = []
        if not on_device:
            self._whole = compile_graph(build, graph, sizes) if parts is None else _compile_split(build, graph, parts)
        else:
            for part in partition(graph, partial(compiles, backend)):
                self._parts.append((part, None if part.graph is None else compile_graph(build, part.graph)))
        # Outputs that are written into the buffer of the input that they replace.
        self._in_place: dict[int, int] = {}
        for k in sorted(self._whole.in_place) if self._whole else ():
            replaced = graph.replaces[k]
            assert replaced is not None  # computations.checked has checked it
            self._in_place[k] = replaced
        self._update = list(self._in_place.values())  # positions of inputs
        self._native = None if self._whole is None or self._converts else self._whole.native
        self._proven = not self._update
        """Whether it has run to its end once. Until then all that it updates is copied first: a kernel that is missing,
        or memory that does not suffice, shows in the first run, and must not leave a step half done."""
        self._unread = [k for k in unread(graph) if k not in self._update]

    def text(self) -> str:
        """The program as the backend's compiler sees it, part by part."""
        if self._whole is not None:
            return self._whole.backend_text
        pieces = []
        for part, compiled in self._parts:
            if compiled is not None:
                pieces.append(compiled.backend_text)
            else:
                pieces += ["on the real device:", *(f"  {node_text(node)}" for node in part.nodes)]
        return "\n".join(pieces)

    def run(self, batch: Batch, symbols: Symbols = ()) -> None:
        """Compute a batch and commit the results. `symbols`: their values, if sizes vary."""
        if self._native is not None:
            self.run_native(batch, symbols)
        elif self._unknown and config.fallback == "error":
            raise _fallback_error(self._backend, self._unknown[0])
        else:
            self._run_in_python(batch, [*batch.numbers(), *symbols])

    def _run_in_python(self, batch: Batch, numbers: list[PythonNumber]) -> None:
        preserve = not self._proven and not self._opaque
        with uninterrupted() if self._in_place else _UNGUARDED:
            try:
                with PlainDispatch():
                    outputs = self._run_opaque(batch, numbers) if self._opaque else self._run(batch, numbers, preserve)
                    self._commit(batch, outputs)
                self._proven = True
            except BaseException as error:
                # What an operator may fail on comes before all updates (passes/donation.py), but for want of memory.
                batch.recover(error, self._update, lost=bool(self._update) and is_out_of_memory(error))
                if not isinstance(error, Exception):
                    raise  # an interrupt: the step is still pending
                self._diagnose(batch, error)

    def accepts(self, symbols: Symbols) -> bool:
        """Whether a program with symbolic sizes is right for these values."""
        accepts = None if self._whole is None else self._whole.accepts
        return accepts is None or accepts(symbols)

    @property
    def is_native(self) -> bool:
        """Whether the program runs without Python; it then knows all its operators."""
        return self._native is not None

    @property
    def servable(self) -> bool:
        """Whether the native part may run it by itself: it needs no Python, and what it updates need not be copied."""
        return self._native is not None and self._proven

    def register(self, structure: C.Structure, constants: Mapping[int, PythonNumber]) -> None:
        """Have the native part run this program, which is servable, by itself: for batches of this structure whose
        numbers, where they are constants to it, are these."""
        assert self._native is not None
        C.remember_program(structure, dict(constants), self._native, self._update, self._diagnose)

    def run_native(self, batch: Batch, symbols: Symbols = ()) -> None:
        """As `run`, for a native program, which reads the numbers itself."""
        try:
            # No signal handler of Python's runs in there. If the step is handed over, it fails later, if at all.
            accepted = batch.run(self._native, self._update, symbols, not self._proven, self._diagnose)
        except Exception as error:
            self._diagnose(batch, error)
        else:
            if accepted:
                self._proven = True
            else:
                self._run_in_python(batch, [*batch.numbers(), *symbols])

    def _run(self, batch: Batch, numbers: list[PythonNumber], preserve: bool) -> list[Any]:
        """The results as tensors. The native part checks them where they are committed: nothing here looks at each."""
        backend = self._backend
        inputs: list[Any] = batch.inputs(self._update, preserve)
        for k in self._unread:
            if self._native is None:
                inputs[k] = None
            elif inputs[k] is None:
                inputs[k] = empty(self._graph.inputs[k].type, backend.device)
        if self._converts:
            inputs = [None if tensor is None else backend.to_data(tensor) for tensor in inputs]
        results = self._results(inputs, numbers)
        _check_count(results, len(self._graph.outputs))
        outputs: list[Any] = list(results)
        for k in self._in_place:
            outputs[k] = None
        if self._converts:
            outputs = [None if k in self._in_place else backend.to_tensor(data) for k, data in enumerate(outputs)]
        if list(map(type, outputs)).count(type(None)) != len(self._in_place):  # to commit, None means 'in place'
            fault = self._fault(outputs)
            assert fault is not None
            raise fault
        return outputs

    def _run_opaque(self, batch: Batch, numbers: list[PythonNumber]) -> list[torch.Tensor]:
        """The results as tensors that stand in for them."""
        backend, graph = self._backend, self._graph
        given = opaque_inputs(backend, batch, graph.inputs, self._update, self._unread)
        results = self._results([data and data.value for data in given], numbers)
        _check_count(results, len(graph.outputs))
        rewritten = {k: data for k, position in self._in_place.items() if (data := given[position]) is not None}
        return opaque_results(backend, graph.outputs, results, given, rewritten)

    def _results(self, inputs: list[Any], numbers: list[PythonNumber]) -> Sequence[Any]:
        if self._whole is not None:
            return self._whole.run(inputs, numbers)
        environment: dict[Value, Any] = dict(zip(self._graph.inputs, inputs, strict=True))
        inputs.clear()
        outstanding = Outstanding()
        with outstanding:
            for part, compiled in self._parts:
                if compiled is not None:
                    outstanding.wait_for(part.takes)
                    self._run_part(part, compiled, environment, numbers)
                else:
                    self._run_on_device(part, environment, numbers, outstanding)
                for value in part.drops:
                    del environment[value]
        return [environment[value] for value in self._graph.outputs]

    def _run_part(
        self, part: Part, compiled: Computation, environment: dict[Value, Any], numbers: list[PythonNumber]
    ) -> None:
        plain = not self._opaque and not self._converts
        given = [environment[value] for value in part.takes]
        # On a GPU, a native program may be bound to the addresses of its inputs.
        without_python = plain and compiled.native is not None and torch.device(self._backend.device).type == "cpu"
        run: Run = compiled.native.run if without_python else compiled.run
        results = run(given, [numbers[k] for k in part.numbers] + numbers[len(self._graph.numbers) :])
        _check_count(results, len(part.gives))
        for value, result in zip(part.gives, results, strict=True):
            environment[value] = self._typed(value, result) if plain else result

    def _run_on_device(
        self, part: Part, environment: dict[Value, Any], numbers: list[PythonNumber], outstanding: Outstanding
    ) -> None:
        """Run operators that the backend does not know, and start collectives, on the real device."""
        backend = self._backend
        here, fallback = torch.device(backend.device), torch.device(backend.fallback_device())
        plain = not self._opaque and not self._converts and here == fallback
        reads = Counter(value for node in part.nodes for value in node.operands)
        spare = {
            value
            for value in part.drops
            if plain and reads[value] == 1 and not outstanding.reads(value) and self._is_spare(value, environment)
        }
        unknown = set(map(id, self._unknown))
        local: dict[Value, torch.Tensor] = {}
        for value in part.takes:
            if not plain:
                outstanding.wait_for([value])
            local[value] = self._typed(value, backend.to_tensor(environment[value])).to(fallback)
        for node in part.nodes:
            if node.op in COLLECTIVES:
                outstanding.start(node, partial(run_node, node, local, numbers, fallback, spare))
                continue
            outstanding.wait_for(node.operands)
            start = perf_counter()
            run_node(node, local, numbers, fallback)
            if id(node) in unknown:  # others are views
                site = node.site
                events.emit(
                    "fallback",
                    op=node.op,
                    reason=f"backend {backend.name!r} does not support it",
                    seconds=perf_counter() - start,
                    **places.of_line(*(site.file, site.line, site.module) if site else ("", 0, "")),
                )
        for value in part.gives:
            if not plain:
                outstanding.wait_for([value])
            environment[value] = backend.to_data(self._typed(value, local[value]).to(here))

    def _is_spare(self, value: Value, environment: dict[Value, Any]) -> bool:
        """Whether nothing but the environment knows the buffer of a value, under one name."""
        tensor = environment[value]
        known = sum(other is tensor for other in environment.values())
        storage = tensor.untyped_storage()  # which counts itself
        return value not in self._inputs and known == 1 and torch._C._storage_Use_Count(storage._cdata) == 2

    def _typed(self, value: Value, tensor: Any) -> torch.Tensor:
        return as_typed(tensor, value.type, lambda: f"its program{self._made_by(value)}")

    # ---- results and faults

    def _commit(self, batch: Batch, outputs: Sequence[Any]) -> None:
        try:
            batch.commit(list(outputs))
        except Exception as error:
            raise self._fault(outputs) or error from None

    def _fault(self, outputs: Sequence[Any]) -> BackendError | None:
        """What is wrong with the results, if they are what is wrong."""
        for k, (value, tensor) in enumerate(zip(self._graph.outputs, outputs, strict=True)):
            if k in self._in_place:
                continue
            if not isinstance(tensor, torch.Tensor):
                return BackendError(f"result {k} is a {type(tensor).__name__}, not a tensor{self._made_by(value)}")
            if tuple(tensor.shape) != value.type.sizes or tensor.dtype != value.type.dtype:
                return BackendError(
                    f"result {k} is {tensor.dtype} of shape {tuple(tensor.shape)}, but {value.type.dtype} of shape "
                    f"{value.type.sizes} was recorded{self._made_by(value)}"
                )
        return None

    def _made_by(self, value: Value) -> str:
        node = producers(self._graph).get(value)
        return f", by {node_text(node)}" if node is not None else ""

    def _diagnose(self, batch: Batch, error: Exception) -> None:
        """A program failed. If the reference path fails as well, the error is the program's own, and that path says at
        which line; if it does not, the fault is the backend's, and the values are there all the same."""
        try:
            if not batch.interpret(interruptible=False):
                return  # an operator of another thread failed, and is reported there
        except CollectiveError as second:
            second.add_note(f"The program of {self._what} had failed: {type(error).__name__}: {error}")
            raise second from error
        what = str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"
        reason = f"its program of {self._what} failed: {what}"
        place = places.here()
        events.emit(
            "backend_fault", stage="execute", backend=self._backend.name, reason=reason, error=repr(error), **place
        )
        raise BackendError(
            f"backend {self._backend.name!r} failed to run {self._what}: {what}\n"
            f"The values were computed by the reference path instead, so nothing is lost. tarry.set_backend('eager') "
            f"goes on without this backend."
        ) from error


class Outstanding:
    """The collectives that a run has started and not waited for, by what they give. None is left at its end."""

    def __init__(self) -> None:
        self._tickets: dict[Value, float] = {}
        self._operands: dict[float, tuple[Value, ...]] = {}  # by ticket

    def reads(self, value: Value) -> bool:
        """Whether a collective that goes on reads what is given in a value."""
        return any(value in operands for operands in self._operands.values())

    def start(self, node: Node, run: Callable[[], None]) -> None:
        """Run a collective's node. It may read the order while the one before it goes on: that is its last result."""
        self.wait_for(node.operands)
        for ticket in C.collect_tickets(run):
            value = next((value for value in node.outputs[:-1] if value is not None), node.outputs[-1])
            assert value is not None
            self._tickets[value] = ticket
            self._operands[ticket] = tuple(node.operands)

    def wait_for(self, values: Iterable[Value]) -> None:
        """Have what is given in these values there."""
        for value in values:
            ticket = self._tickets.pop(value, None)
            if ticket is not None:
                del self._operands[ticket]
                torch.ops.tarry_c10d.wait(ticket)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for value in list(self._tickets):
            with suppress(Exception) if kind else nullcontext():  # the first error is the one to report
                self.wait_for([value])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated. A CPU's allocator says so in a RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "t allocate memory" in str(error)


def _check_count(results: Any, expected: int) -> None:
    if not isinstance(results, Sequence):
        raise BackendError(f"it gave a {type(results).__name__}, not a list of results")
    if len(results) != expected:
        raise BackendError(f"it gave {len(results)} results for {expected} outputs")


def _compile_split(build: Build, graph: Graph, parts: Split) -> Computation:
    """A program in two parts, of which the first can run ahead."""
    early, late = compile_graphs(build, [parts.early, parts.late])

    def run(inputs: list[Any], numbers: list[PythonNumber]) -> list[Any]:
        first = early.run([inputs[k] for k in parts.early_takes], numbers)
        second = late.run([inputs[k] if k >= 0 else first[-1 - k] for k in parts.late_takes], numbers)
        return [second[k] if k >= 0 else first[-1 - k] for k in parts.outputs]

    native = None
    if early.native is not None and late.native is not None:
        takes = (parts.early_takes, parts.late_takes, parts.outputs, parts.numbers, parts.seeds)
        native = C.split_program(early.native, late.native, *map(list, takes))
    in_place = frozenset(k for k, source in enumerate(parts.outputs) if source in late.in_place)
    return Computation(run, graph, in_place, lambda: f"{early.backend_text}\n\n{late.backend_text}", native)


def _fallback_error(backend: Backend, node: Node) -> FallbackError:
    return FallbackError(
        f"{node.op} has to run on the real device because backend {backend.name!r} does not support it (at "
        f"{node.site or 'an unknown line'}), and tarry.config.fallback is 'error'. Avoid it there, or set "
        f"tarry.config.fallback = 'allow'."
    )
