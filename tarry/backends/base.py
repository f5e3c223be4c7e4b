"""The contract between the runtime and a backend: subclass `Backend`, write `compile`, and PyTorch has a device.

The least that a backend must write is `compile(graph)`, which returns a function from tensors and numbers to tensors.
Everything else has a default that works, and is overridden where a backend can do better or is different: where data
live (`to_data`, `to_tensor`), which operators it knows (`supports`, `decompositions`), which numbers it can take anew
at each run (`takes_number`), what it can do at all (`capabilities`). The runtime believes what is declared.

A backend object is one device. A backend that has several gives one object for each (`devices`), and each serves
its own device only: programs and data never pass from one to another.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias

from tarry.errors import BackendError
from tarry.ir.graph import Graph, Node, Number
from tarry.ir.layout import TensorType
from tarry.ir.raw import RawGraph
from tarry.ir.sizes import Symbols

if TYPE_CHECKING:
    import torch

    from tarry.native import _C
    from tarry.passes.pieces import Pieces

PythonNumber: TypeAlias = int | float | complex
Policy: TypeAlias = Literal["wait", "background", "never"]
"""What a step does whose graph has no program yet (docs/compiling.md)."""
Run: TypeAlias = Callable[[list[Any], list[PythonNumber]], Sequence[Any]]
"""A compiled program: the data of the graph's inputs and the values of its numbers, to the data of its outputs."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. Declared, not guessed: the runtime relies on it.

    `opaque_data`: data are objects of the backend's own, which only its `to_tensor` can read; they stay with the
    backend from step to step. Otherwise data are tensors on `Backend.device`, or become such without harm at the end of
    a step.
    `asynchronous`: `run` may return before its results are there; `to_tensor` and `synchronize` wait for them. Devices
    that are asynchronous compute at the same time.
    `updates_in_place`: the backend makes use of `Graph.replaces` (see Computation.in_place).
    `symbolic_sizes`: `compile_symbolic` makes programs for steps whose sizes vary.
    `pieces`: compiling takes so long that a graph whose parts repeat is compiled in pieces (passes/pieces.py), each
    kind once, although nothing is fused across them.
    `device_types`: the kinds of real devices it runs on.
    """

    opaque_data: bool = False
    asynchronous: bool = False
    updates_in_place: bool = False
    symbolic_sizes: bool = False
    pieces: bool = False
    device_types: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class Computation:
    """A compiled program with what is known of it. `compile` may return its `run` alone.

    `in_place` are the outputs k that `run` writes into the buffer of input `graph.replaces[k]`, which nothing
    else has then; what `run` returns for them is ignored. `text` is the program as the backend's compiler sees it, or a
    function that makes that text. `native` is the same program in a form that runs without Python
    (csrc/execute/program.h); the runtime then uses `run` only for inputs that it does not accept. `artifact` makes
    bytes of the program, from which `Backend.load` makes it again in another process; it raises
    `tarry.Unsupported(None, why)` for a program of which it cannot. `accepts` says whether a program with symbolic
    sizes is right for some values of the symbols.
    """

    run: Run
    graph: Graph
    in_place: frozenset[int] = frozenset()
    text: str | Callable[[], str] = ""
    native: Any = None
    artifact: Callable[[], bytes] | None = None
    accepts: Callable[[Sequence[int]], bool] | None = None

    @property
    def parameter_types(self) -> tuple[TensorType, ...]:
        return tuple(value.type for value in self.graph.inputs)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return tuple(f"%{value.id}" for value in self.graph.inputs)

    @property
    def result_types(self) -> tuple[TensorType, ...]:
        return tuple(value.type for value in self.graph.outputs)

    @property
    def backend_text(self) -> str:
        """The text of the compiled program; that of its graph where the backend has none."""
        made = self.text() if callable(self.text) else self.text
        return made or str(self.graph)


@dataclass(eq=False)
class Data:
    """What a backend holds for one tensor: a handle that can exist before its value does.

    The runtime wraps what a backend with `opaque_data` returns; others never see one. Two handles are the same data if
    one was assigned from the other.
    """

    type: TensorType
    backend: Backend
    value: Any = None
    has_value: bool = False
    handle: int = field(default_factory=itertools.count(1).__next__)

    def assign(self, other: Data) -> None:
        """Become the same data as another handle of the same type."""
        if other.type != self.type or other.backend is not self.backend:
            raise BackendError(
                f"Data.assign: a handle to {self.type} of backend {self.backend.name!r} cannot become one to "
                f"{other.type} of backend {other.backend.name!r}"
            )
        self.value, self.has_value, self.handle = other.value, other.has_value, other.handle

    def set(self, value: Any) -> Data:
        """Give the handle its value."""
        self.value, self.has_value = value, True
        return self


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of a real device; 0 where it is not known."""

    free: int = 0
    total: int = 0


def host_memory() -> MemoryInfo:
    """What this process can have of the host's memory: what the system can give without swapping, within the limit of
    its control group (a container's, mostly)."""
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), free)
    for limit_file, use_file in _CONTROL_GROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            limit, used = int(Path(limit_file).read_text()), int(Path(use_file).read_text())
            free, total = max(min(free, limit - used), 0), min(total, limit)
    return MemoryInfo(free, total)


_CONTROL_GROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Batch(Protocol):
    """What is pending at one moment (csrc/execute/batch.h), to be computed and committed exactly once."""

    unawaited: bool
    by_reference: bool
    """The reference path computes it, for a reason that lasts (csrc/record/direct.h)."""

    @property
    def is_partial(self) -> bool:
        """The first operators of its stretch ran directly, so that it is not worth a program."""

    @property
    def key(self) -> tuple[int, int]: ...
    @property
    def device(self) -> int: ...
    @property
    def num_operations(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    def switches_are_set(self) -> bool: ...
    @property
    def is_small(self) -> bool: ...
    def structure(self) -> _C.Structure: ...
    def matches(self, structure: _C.Structure, /) -> bool: ...
    def outline(self) -> _C.Outline: ...
    def call_site(self) -> tuple[int, int]: ...
    def inputs(self, update: list[int], preserve: bool = False) -> list[torch.Tensor]: ...
    def recover(self, error: BaseException, update: list[int], lost: bool) -> None: ...
    def own_inputs(self) -> list[torch.Tensor]: ...
    def numbers(self) -> list[PythonNumber]: ...
    def raw(self) -> RawGraph: ...
    def run(
        self, program: Any, update: list[int], symbols: Sequence[int], preserve: bool, diagnose: Callable[..., None]
    ) -> bool: ...
    def positions(self) -> tuple[list[int], list[int]]: ...
    def interpret(self, interruptible: bool) -> bool: ...
    def commit(self, outputs: list[torch.Tensor | None]) -> None: ...


class Step(Protocol):
    """Computes batches of one structure, from their recorded form to the commit (`Backend.prepare`)."""

    def __call__(self, batch: Batch) -> None: ...


class Recording:
    """What was recorded of one step. The next step uses the nodes of its batch again: `take()` it, to keep it."""

    def __init__(self, batch: Batch) -> None:
        self.key = batch.key
        self.device = batch.device
        self.num_operations = batch.num_operations
        self._batch: Batch | None = batch
        self.place: Mapping[str, Any] = {}
        """The line at which it is computed, as fields of an event (places.py), if that is known."""

    def take(self) -> Self:
        """Take all that compiling needs out of the batch."""
        assert self._batch is not None
        self.numbers = self._batch.numbers()
        self.positions = self._batch.positions()
        self.raw = self._batch.raw()
        self._batch = None
        return self

    @cached_property
    def raw(self) -> RawGraph:
        """The graph as the native part gives it (csrc/bind/bind_batch.cpp)."""
        assert self._batch is not None
        return self._batch.raw()

    @cached_property
    def recorded(self) -> Graph:
        """The graph as it was recorded."""
        from tarry.ir.build import from_raw

        return from_raw(self.raw)

    def graph(self, stage: str = "optimized") -> Graph:
        """The step as typed IR: "recorded" as it was, or "optimized" (functional, clean views, no dead code)."""
        from tarry.passes.pipeline import run

        return run(self.recorded, stage)

    @cached_property
    def lines(self) -> tuple[str, str] | None:
        """The lines of the program from which and to which it was recorded, if they are known."""
        lines = [f"{node['file']}:{node['line']}" for node in self.raw["nodes"] if node["file"]]
        return (lines[0], lines[-1]) if lines else None

    def describe(self) -> str:
        """The step in a few words: its size, and the lines of the program that it spans."""
        where = f", recorded from {self.lines[0]} to {self.lines[1]}" if self.lines else ""
        return f"a step of {self.num_operations} operators{where}"


class Backend:
    """Subclass it, give it a `name`, and write `compile`. Its tensors live on `device` ("cpu", "cuda:0").

    The runtime calls `setup`, `teardown`, `seed` and `metrics` of the backend that was chosen, and all else of that
    backend's `devices()`: this very object, unless there are several."""

    name: str = ""
    capabilities: Capabilities = Capabilities()
    stage: str = "optimized"
    """The stage of the graph that `compile` is given (docs/ir.md)."""

    compile_policy: Policy = "wait"
    """What a step does while its graph is not compiled, unless the user says: a compiler that takes seconds is better
    kept in the background."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"<backend {self.name!r} on {', '.join(one.device for one in self.devices())}>"

    # ---- compiling

    def compile(self, graph: Graph) -> Computation | Run:
        """Make the program that computes this graph, for any inputs of its types and any numbers.

        Raise `tarry.Unsupported(node, why)` for what cannot be compiled after all: the step then runs on the reference
        path, and is counted.
        """
        raise NotImplementedError(f"backend {self.name or type(self).__name__!r} does not define compile(graph)")

    def compile_all(self, graphs: Sequence[Graph]) -> Sequence[Computation | Run]:
        """As `compile`, for several graphs. Override it if a part of that work can be done for all of them together."""
        return [self.compile(graph) for graph in graphs]

    def compile_symbolic(self, graph: Graph, symbols: Symbols) -> Computation:
        """As `compile`, for a graph in which some sizes, strides and integers are `Size`s: they stand for whatever
        their polynomials are at the values of the symbols. These values follow the numbers at each run; they are above
        1. In the graph at hand they are `symbols`. Raise `tarry.Unsupported` if that is too much for this graph."""
        raise NotImplementedError(f"backend {self.name or type(self).__name__!r} does not define compile_symbolic")

    def supports(self, node: Node) -> bool:
        """Whether `compile` knows this operator. What it does not know is decomposed, or runs on the real device."""
        return True

    def decompositions(self) -> Mapping[str, Callable[..., Any]]:
        """Operators by name, with functions that compute them by simpler ones: torch._decomp has many. An operator that
        is not supported and stands here is replaced before anything else is tried."""
        return {}

    def takes_number(self, node: Node, number: Number, varied: bool) -> bool:
        """Whether a Python number can be an input of the compiled program where this node uses it, so that a new value
        needs no new program. A number for which this is False is a constant of the graph; another value then compiles
        another program. `varied` says that it has changed before. Seeds are always inputs."""
        return True

    def runs_ahead(self, graph: Graph) -> bool:
        """Whether this graph may be compiled in two parts, of which the first runs on another thread while the rest of
        the step is still being recorded. It takes programs that need no Python (`Computation.native`)."""
        return False

    def compose(self, graph: Graph, pieces: Pieces, parts: Sequence[Computation]) -> Computation | None:
        """Make one program of a graph's pieces, of which `parts` are the programs, if there is a better way than to run
        one after the other."""
        return None

    # ---- programs that outlive the process

    def load(self, graph: Graph, data: bytes) -> Computation | Run:
        """Make the program for a graph from what `Computation.artifact` gave, here or in an earlier process with the
        same `fingerprint`. If it raises, the stored program is thrown away and the graph compiled."""
        raise NotImplementedError(f"backend {self.name!r} gives artifacts, but does not define load(graph, data)")

    def fingerprint(self) -> str:
        """All that decides what `compile` makes of a graph, besides the graph and the versions of torch and tarry:
        options, the kind of device, settings of the process. Programs are found again under the same fingerprint
        only. Devices that have the same one share what is stored, so that a graph is compiled once for all of them."""
        return f"{type(self).__module__}.{type(self).__qualname__} on {self.device}"

    def recipe(self) -> Any:
        """What another process needs, as JSON values, to make a backend that compiles as this one does (`from_recipe`).
        None: there is no such thing, and compiling in the background happens on a thread of this process."""
        return None

    @classmethod
    def from_recipe(cls, recipe: Any) -> Backend:
        """The backend of a recipe, in a process that does nothing but compile: its settings may be set at will."""
        raise NotImplementedError(f"{cls.__qualname__} gives recipes, but does not define from_recipe(recipe)")

    # ---- data

    def to_data(self, tensor: torch.Tensor) -> Any:
        """The backend's data for a tensor of the real device. Not to be changed afterwards."""
        return tensor

    def to_tensor(self, data: Any) -> torch.Tensor:
        """The tensor of the real device for data of the backend."""
        tensor: torch.Tensor = data
        return tensor

    def scalar(self, value: PythonNumber, dtype: torch.dtype) -> Any:
        """The backend's data for one number."""
        import torch

        return self.to_data(torch.tensor(value, dtype=dtype, device=self.device))

    def placeholder(self, type_: TensorType) -> Data:
        """A handle to data that are not there yet."""
        return Data(type_, self)

    def receive(self, data: Any, sender: Backend) -> Any:
        """This device's data for data of another device of the same backend: a copy, which outlives the original.
        Override it if that can be done without the host, or without waiting for the sender."""
        import torch

        return self.to_data(sender.to_tensor(data).to(torch.device(self.device)))

    # ---- devices

    def devices(self) -> Sequence[Backend]:
        """The backends of tarry:0, tarry:1, ..., one for each device. Asked once each time the backend is chosen, after
        `setup`."""
        return (self,)

    default_ordinal: int = 0
    """Which of them plain "tarry" means when the backend is chosen."""

    def fallback_device(self) -> str:
        """Where operators run that the backend does not support. Their data come through `to_tensor`."""
        return self.device

    # ---- its life

    def setup(self) -> None:
        """Called when the backend becomes the current one."""

    def teardown(self) -> None:
        """Called when another backend replaces it, and at exit. All its tensors are materialised by then."""

    def seed(self, value: int) -> None:
        """`torch.manual_seed` was called. Random nodes carry seeds of their own, drawn from that one: only a backend
        that draws random numbers beside them needs this."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device computes while its host goes on."""
        return self.capabilities.asynchronous or self.device.startswith("cuda")

    def synchronize(self) -> None:
        """Wait for what is in flight on the device."""
        import torch

        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    # ---- looking inside

    def metrics(self) -> Mapping[str, float]:
        """Counts and times of the backend's own, shown by `tarry.metrics`."""
        return {}

    def memory_info(self) -> MemoryInfo:
        """Free and total memory of the device."""
        import torch

        device = torch.device(self.device)
        if device.type == "cuda":
            return MemoryInfo(*torch.cuda.mem_get_info(device))
        return host_memory()

    # ---- for backends that need no graph

    def prepare(self, recording: Recording) -> Step | None:
        """Take a whole step over, from its recorded form to the commit. None: the runtime uses `compile`."""
        return None
