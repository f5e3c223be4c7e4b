"""A step as a backend compiles it: from the recorded batch to the backend's function and back to the storages.

What is the same for all backends is here: which numbers are inputs and which constants (and what happens when a constant
changes), operators that the backend does not know, its data objects, the check of its results, and what its faults are
turned into. A backend only sees graphs, data and numbers.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from tarry import events
from tarry.backends.base import Backend, Batch, Computation, Data, Program, PythonNumber
from tarry.backends.partition import Part, partition
from tarry.errors import BackendError, Unsupported
from tarry.ir.evaluate import run_node
from tarry.ir.graph import Graph, Node, Number, Value, leaves, producers, typed
from tarry.ir.text import node_text
from tarry.passes.decompose import decompose
from tarry.passes.donation import safe_updates
from tarry.passes.specialize import specialize
from tarry.runtime.dispatch import plain_dispatch

MAX_VARIANTS = 8
"""Programs for one graph that differ in the constants they were compiled with. After that many, the graph is
interpreted: compiling costs more than it saves."""


Recompile: TypeAlias = Callable[[Batch, str, Callable[[], "_Variant"]], "_Variant"]
"""Has another program compiled for a batch, and tells why."""


class CompiledStep:
    """The programs of one structure of graph. They differ in the numbers that are constants to them."""

    def __init__(self, backend: Backend, batch: Batch, recompile: Recompile, guard: Callable[[], object]) -> None:
        self._backend = backend
        self._graph = Program(batch).graph(backend.stage)
        self._uses = _uses(self._graph)
        self._variants: list[_Variant] = []
        self._varied: set[int] = set()
        self._recompile = recompile
        self._guard = guard
        self._compile(batch.numbers())

    @property
    def computations(self) -> list[Computation]:
        """What the backend has compiled, part by part."""
        return [c for variant in self._variants for c in variant.computations]

    def __call__(self, batch: Batch) -> None:
        numbers = batch.numbers()
        for variant in self._variants:
            if variant.accepts(numbers):
                break
        else:
            if len(self._variants) >= MAX_VARIANTS:
                events.emit("interpreted", key=batch.key, reason=self._explain(numbers))
                batch.interpret(interruptible=False)
                return
            reason = self._explain(numbers)
            self._varied.update(self._variants[-1].changed(numbers))
            variant = self._recompile(batch, reason, lambda: self._compile(numbers))
        variant.run(batch, numbers)

    def _compile(self, numbers: Sequence[PythonNumber]) -> _Variant:
        """Compile a program for these numbers; those that cannot be inputs are constants of it."""
        backend = self._backend
        constants = {
            number.index: numbers[number.index]
            for number in self._graph.numbers
            if number.kind != "seed" and not self._is_input(number)
        }
        graph = specialize(self._graph, constants)
        table = backend.decompositions()
        if table:
            graph = decompose(graph, table, backend.supports)
        graph = safe_updates(graph) if backend.capabilities.updates_in_place else _without_updates(graph)
        variant = _Variant(backend, graph, constants, self._guard)
        self._variants.append(variant)
        return variant

    def _is_input(self, number: Number) -> bool:
        backend = self._backend
        for node in self._uses.get(number.index, ()):
            if not backend.supports(node):
                if node.op in backend.decompositions():
                    return False  # a decomposition is made for its value
                continue  # run_node takes it as it comes
            if not backend.takes_number(node, number, number.index in self._varied):
                return False
        return True

    def _explain(self, numbers: Sequence[PythonNumber]) -> str:
        last = self._variants[-1]
        index = last.changed(numbers)[0]
        node = next(iter(self._uses[index]))
        return f"a number of {node.op} at {node.site} was {last.constants[index]} and is {numbers[index]} now"


class _Variant:
    """One compiled program, in parts if the backend does not know all its operators."""

    def __init__(
        self, backend: Backend, graph: Graph, constants: Mapping[int, PythonNumber], guard: Callable[[], object]
    ) -> None:
        self.constants = constants
        self._guard = guard
        self._backend = backend
        self._graph = graph
        self._pick, self._expected = _guard(constants)
        whole = all(backend.supports(node) for node in graph.nodes)
        self._parts = [] if whole else partition(graph, backend.supports)
        self._whole = _compile(backend, graph) if whole else None
        self._compiled = {
            k: _compile(backend, part.graph) for k, part in enumerate(self._parts) if part.graph is not None
        }
        in_place = self._whole.in_place if self._whole else frozenset()
        self._in_place = in_place
        self._update = [i for k, i in enumerate(graph.replaces) if k in in_place and i is not None]

    @property
    def computations(self) -> list[Computation]:
        return [self._whole] if self._whole else list(self._compiled.values())

    def accepts(self, numbers: Sequence[PythonNumber]) -> bool:
        return self._pick is None or self._pick(numbers) == self._expected

    def changed(self, numbers: Sequence[PythonNumber]) -> list[int]:
        return [i for i, value in self.constants.items() if typed(numbers[i]) != typed(value)]

    def run(self, batch: Batch, numbers: list[PythonNumber]) -> None:
        """Compute a batch and commit the results."""
        backend = self._backend
        with _uninterrupted(bool(self._in_place)):
            try:
                with plain_dispatch(self._guard):
                    if backend.capabilities.opaque_data:
                        inputs = _opaque_inputs(backend, batch)
                    else:
                        inputs = batch.inputs(self._update)
                        if _converts(backend):
                            inputs = [backend.to_data(tensor) for tensor in inputs]
                    outputs = self._checked(self._results(inputs, numbers, batch))
            except Exception as error:
                self._diagnose(batch, error)
            else:
                batch.commit(outputs)

    def _results(self, inputs: list[Any], numbers: list[PythonNumber], batch: Batch) -> Sequence[Any]:
        if self._whole is not None:
            return self._whole.run(inputs, numbers)
        backend, graph = self._backend, self._graph
        environment: dict[Value, Any] = dict(zip(graph.inputs, inputs, strict=True))
        device = torch.device(backend.fallback_device(batch.device))
        for k, part in enumerate(self._parts):
            compiled = self._compiled.get(k)
            if compiled is not None:
                results = compiled.run([environment[value] for value in part.takes], numbers)
                environment.update(zip(part.gives, results, strict=True))
            else:
                _run_on_device(backend, part, environment, numbers, device)
        return [environment[value] for value in graph.outputs]

    def _checked(self, results: Sequence[Any]) -> list[torch.Tensor | None]:
        backend, graph = self._backend, self._graph
        if len(results) != len(graph.outputs):
            raise BackendError(f"it gave {len(results)} results for {len(graph.outputs)} outputs")
        if backend.capabilities.opaque_data:
            return [
                _stand_in(backend.placeholder(value.type).set(result))
                for value, result in zip(graph.outputs, results, strict=True)
            ]
        outputs: list[torch.Tensor | None] = []
        converts = _converts(backend)
        for k, (value, result) in enumerate(zip(graph.outputs, results, strict=True)):
            if k in self._in_place:
                outputs.append(None)
                continue
            tensor = backend.to_tensor(result) if converts else result
            if not isinstance(tensor, torch.Tensor):
                raise BackendError(f"result {k} is a {type(tensor).__name__}, not a tensor{_made_by(graph, value)}")
            if tuple(tensor.shape) != value.type.sizes or tensor.dtype != value.type.dtype:
                raise BackendError(
                    f"result {k} is {tensor.dtype} of shape {tuple(tensor.shape)}, but {value.type.dtype} of shape "
                    f"{value.type.sizes} was recorded{_made_by(graph, value)}"
                )
            outputs.append(tensor)
        return outputs

    def _diagnose(self, batch: Batch, error: Exception) -> None:
        """A program failed. If the reference path fails as well, the error is the program's own, and that path says at
        which line; if it does not, the fault is the backend's, and the values are there all the same."""
        events.emit("error", stage="execute", backend=self._backend.name, error=repr(error))
        batch.interpret(interruptible=False)
        raise BackendError(
            f"backend {self._backend.name!r} failed to run {describe(self._graph)}: {error}\n"
            f"The values were computed by the reference path instead, so nothing is lost. tarry.set_backend('eager') "
            f"goes on without this backend."
        ) from error


def _compile(backend: Backend, graph: Graph) -> Computation:
    made = backend.compile(graph)
    if isinstance(made, Computation):
        return made
    if not callable(made):
        raise BackendError(f"backend {backend.name!r}: compile(graph) gave {made!r}, which cannot be called")
    return Computation(made, graph)


def _uses(graph: Graph) -> dict[int, list[Node]]:
    found: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for leaf in leaves(node.args):
            if isinstance(leaf, Number):
                found.setdefault(leaf.index, []).append(node)
    return found


def _without_updates(graph: Graph) -> Graph:
    return replace(graph, replaces=(None,) * len(graph.outputs))


def _guard(constants: Mapping[int, PythonNumber]) -> tuple[Callable[[Any], Any] | None, Any]:
    """A function that picks the numbers that were made constants, and what it must give. Types are part of the graph's
    structure, so only values are compared; -0.0 passes for 0.0 only where both are, NaN for NaN."""
    if not constants:
        return None, None
    indices = tuple(constants)
    if all(value == value and value != 0 for value in constants.values()):
        pick = itemgetter(*indices)
        return pick, constants[indices[0]] if len(indices) == 1 else tuple(constants.values())
    return lambda numbers: [typed(numbers[i]) for i in indices], [typed(value) for value in constants.values()]


# ---- data


def _converts(backend: Backend) -> bool:
    kind = type(backend)
    return kind.to_data is not Backend.to_data or kind.to_tensor is not Backend.to_tensor


def _stand_in(data: Data) -> torch.Tensor:
    """A tensor without memory, which a storage can hold in place of data that only the backend can read."""
    type_ = data.type
    tensor = torch.empty_strided(type_.sizes, type_.strides, dtype=type_.dtype, device="meta")
    tensor._tarry_data = data  # type: ignore[attr-defined]
    return tensor


def read_stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of the real device for one that stands in for a backend's data."""
    data: Data | None = getattr(tensor, "_tarry_data", None)
    if data is None or not data.has_value:
        raise BackendError("these data belong to a backend that has not given them a value")
    return data.backend.to_tensor(data.value)


def _opaque_inputs(backend: Backend, batch: Batch) -> list[Any]:
    """The backend's data for the inputs. What was converted once stays with the tensor it was made from."""
    inputs = []
    for tensor in batch.own_inputs():
        data: Data | None = getattr(tensor, "_tarry_data", None)
        if data is None or data.backend is not backend:
            real = tensor if data is None else read_stand_in(tensor)
            data = backend.placeholder(_type_of(real)).set(backend.to_data(real))
            events.emit("transfer", direction="to backend", bytes=real.nbytes)
            if not tensor.is_meta:
                tensor._tarry_data = data  # type: ignore[attr-defined]
        inputs.append(data.value)
    return inputs


def _type_of(tensor: torch.Tensor) -> Any:
    from tarry.ir.layout import TensorType

    return TensorType.of(tensor)


def _run_on_device(
    backend: Backend, part: Part, environment: dict[Value, Any], numbers: list[PythonNumber], device: torch.device
) -> None:
    """Run operators that the backend does not know, on the real device."""
    local: dict[Value, torch.Tensor] = {}
    for value in part.takes:
        local[value] = backend.to_tensor(environment[value]).to(device)
    for node in part.nodes:
        site = node.site
        events.emit(
            "fallback",
            op=node.op,
            reason=f"backend {backend.name!r} does not support it",
            file=site.file if site else "",
            line=site.line if site else 0,
        )
        run_node(node, local, numbers, device)
    for value in part.gives:
        environment[value] = backend.to_data(local[value])


# ---- faults


def describe(graph: Graph) -> str:
    """A graph in a few words: its size, and the lines of the program that it spans."""
    sites = [node.site for node in graph.nodes if node.site is not None]
    where = f", recorded from {sites[0]} to {sites[-1]}" if sites else ""
    return f"a step of {len(graph.nodes)} operators{where}"


def _made_by(graph: Graph, value: Value) -> str:
    node = producers(graph).get(value)
    return f", by {node_text(node)}" if node is not None else ""


def unsupported_message(backend: Backend, error: Unsupported) -> str:
    where = ""
    if isinstance(error.node, Node):
        where = f" ({error.node.op}" + (f" at {error.node.site})" if error.node.site else ")")
    return f"backend {backend.name!r} does not compile this step{where}: {error.reason}"


@contextmanager
def _uninterrupted(wanted: bool) -> Iterator[None]:
    """Hold back an interrupt while buffers are being overwritten: a step is either done or not begun."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None or before is signal.SIG_IGN or before is signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held and callable(before):
        before(*held[0])


@dataclass(frozen=True)
class InterpretedStep:
    """A step that the backend cannot compile: the reference path takes it, every time."""

    reason: str

    def __call__(self, batch: Batch) -> None:
        events.emit("interpreted", key=batch.key, reason=self.reason)
        batch.interpret(interruptible=False)
