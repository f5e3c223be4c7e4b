"""A compiled program on a CUDA device as one CUDA graph.

A launch of the whole graph costs as much as a few launches of kernels. A graph reads and writes fixed addresses, so its
inputs are sorted: those that keep their place are read there (parameters, optimizer state: updated where they are), and
others are copied to placeholders before each launch. If an input turns out to have moved, the graph is captured anew;
one that moves again gets a placeholder. Launching is native (csrc/execute/captured.h).

Each random operator of a graph has a generator of its own, which is seeded before each launch with the seed that the
operator has drawn when it was recorded: it gives the numbers that it would give outside of a graph.

Private to torch, checked on 2.11: CUDAGraph.raw_cuda_graph_exec, torch._C._cuda_clearCublasWorkspaces, and the symbol
of CUDAGraph::replay in libtorch_cuda (random graphs only; there on 2.13, too, by its headers).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tarry.backends.base import PythonNumber
from tarry.backends.fx import Signature
from tarry.ir.evaluate import drawing_from
from tarry.native import C

log = logging.getLogger("tarry")

PATIENCE = 5
"""Runs after which a program that updates inputs is captured although some still move from one to the next: what the
early part of a step (passes/split.py) gives to the late part moves until the early part is a graph, after two."""
MAX_CAPTURES = 6
"""Captures of one program. One whose inputs keep moving all the same is not captured any more."""


class Capture:
    """Runs a program kernel by kernel until it can be captured. `program` then takes over, for as long as its inputs
    are where they were."""

    def __init__(
        self, program: Signature, compiled: Callable[[list[Any]], Sequence[Any]], counts: Counter[str]
    ) -> None:
        self._fx = program
        self._counts = counts
        self._compiled = compiled
        self._runs = 0
        self._captures = 0
        self._addresses: list[int] = []  # of the inputs, in the last run
        self._moved: set[int] = set()  # since the last run
        self._moves: Counter[int] = Counter()  # since there has been a graph
        self._copied: set[int] = set()  # inputs, to placeholders
        replaces = program.graph.replaces
        self._updated = {index for k, index in enumerate(replaces) if k in program.in_place and index is not None}
        self._returned = [k for k in range(len(program.graph.outputs)) if k not in program.in_place]
        self._patience = PATIENCE if self._updated else 2
        self._why_not = ""
        self._give_up(_why_not(program))
        self.program: Any = C.CapturedProgram()

    def run(self, inputs: list[Any], numbers: list[PythonNumber]) -> list[Any]:
        """Compute the results by the graph if it takes the inputs, else kernel by kernel; the program is then captured
        for inputs at these addresses, if the time has come."""
        if self.program.accepts(inputs):
            made: list[Any] = self.program.run(inputs, numbers)
            return made
        given = list(inputs)
        results = self._compiled([*given, *self._fx.number_tensors(numbers)])
        self._runs += 1
        if not self._why_not:
            self._look(given)
            settled = not self._moved or self._captures or self._runs >= self._patience
            if settled and self._runs > 1:  # kernels choose their configurations in the first run
                self._capture(given, numbers)
        outputs: list[Any] = [None] * len(self._fx.graph.outputs)
        for k, result in zip(self._returned, results, strict=True):
            outputs[k] = result
        return outputs

    def _look(self, inputs: list[torch.Tensor]) -> None:
        addresses = [tensor.data_ptr() for tensor in inputs]
        if self._addresses:
            self._moved = {k for k, (a, b) in enumerate(zip(self._addresses, addresses, strict=True)) if a != b}
        self._addresses = addresses
        if self._captures:
            self._moves.update(self._moved)
            self._copied.update(k for k, moves in self._moves.items() if moves > 1)
        elif self._runs >= self._patience:
            self._copied = set(self._moved)

    def _capture(self, inputs: list[torch.Tensor], numbers: list[PythonNumber]) -> None:
        self.program.clear()  # the memory of the last graph is needed for the next
        self._captures += 1
        if self._captures > MAX_CAPTURES:
            self._give_up(f"inputs moved between steps after each of {MAX_CAPTURES} captures")
            return
        try:
            self._set_graph(inputs, numbers)
        except Exception as error:
            torch.cuda.synchronize()
            self._give_up(f"{type(error).__name__}: {error}")
        else:
            self._counts["cuda_graphs"] += 1
            log.info(
                "a step of %d operators is a CUDA graph (capture %d); inputs that are copied at each launch: %d of %d",
                len(self._fx.graph.nodes), self._captures, len(self._copied), len(inputs),
            )  # fmt: skip

    def _give_up(self, why: str) -> None:
        self._why_not = why
        if why:
            self._counts["not_captured"] += 1
            log.info("a step of %d operators is no CUDA graph: %s", len(self._fx.graph.nodes), why)

    def _set_graph(self, inputs: list[torch.Tensor], numbers: list[PythonNumber]) -> None:
        fx = self._fx
        placeholders = [_like(tensor) if k in self._copied else None for k, tensor in enumerate(inputs)]
        given = [tensor if own is None else own for tensor, own in zip(inputs, placeholders, strict=True)]
        seeds = [index for vector in fx.vectors if vector.on_host for index in vector.indices]
        on_device = [k for k, vector in enumerate(fx.vectors) if not vector.on_host]
        vectors = [
            torch.arange(len(seeds)) if vector.on_host else tensor  # positions of generators; one vector: see _why_not
            for vector, tensor in zip(fx.vectors, fx.number_tensors(numbers), strict=True)
        ]
        generators = [torch.Generator(self._fx.device) for _ in seeds]
        recorded = record(self._compiled, [*given, *vectors], generators)
        outputs: list[torch.Tensor | None] = [None] * len(fx.graph.outputs)
        for k, result in zip(self._returned, recorded.results, strict=True):
            outputs[k] = result
        self.program.set_graph(
            recorded.launch,
            recorded.executable,
            recorded.owner,
            [0 if k in self._copied else address for k, address in enumerate(self._addresses)],
            placeholders,
            sorted(self._copied & self._updated),
            [(fx.vectors[k].dtype, fx.vectors[k].indices) for k in on_device],
            [vectors[k] for k in on_device],
            recorded.replay,
            recorded.captured,
            generators,
            seeds,
            outputs,
            [*given, *vectors],
        )


class Recorded(NamedTuple):
    """A function's kernels as a graph, with its results where it leaves them."""

    launch: int  # address of a function of the graph and a stream
    executable: int
    replay: int  # address of a function of PyTorch's graph, for those with generators; else 0
    captured: int  # address of that
    owner: Any  # keeps the graph alive
    results: Sequence[torch.Tensor]


def record(
    function: Callable[[list[Any]], Sequence[Any]],
    arguments: list[torch.Tensor],
    generators: Sequence[torch.Generator] = (),
) -> Recorded:
    """What the function does to these tensors, drawing from these generators; nothing is done to them yet."""
    graph = torch.cuda.CUDAGraph()
    _drop_workspaces()  # those of the stream that the kernels ran on so far
    with torch.cuda.device(arguments[0].device):
        for generator in generators:
            graph.register_generator_state(generator)
        with drawing_from(generators), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = function(list(arguments))
    _drop_workspaces()  # the graph has the memory of its own
    replay = _replay_address() if generators else 0
    return Recorded(_launch_address(), graph.raw_cuda_graph_exec(), replay, C.address_of(graph), graph, results)


def _why_not(program: Signature) -> str:
    """Why a program cannot be captured, as far as is known without trying; empty if it can."""
    on_host = [index for vector in program.vectors if vector.on_host for index in vector.indices]
    if any(program.graph.numbers[index].kind != "seed" for index in on_host):
        return "a number is needed on the host (by a custom operator, say)"
    if not program.graph.inputs:
        return "it has no inputs"
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
        return f"torch {torch.__version__} does not give access to captured graphs"
    return ""


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _drop_workspaces() -> None:
    """cuBLAS keeps tens of megabytes for each stream that it has ever been used on."""
    drop = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if drop is not None:
        drop()


@functools.cache
def _launch_address() -> int:
    """The function of the CUDA runtime that launches a graph, from the library that torch has loaded."""
    major = str(torch.version.cuda).split(".")[0]
    library = ctypes.CDLL(f"libcudart.so.{major}")
    return _address(library.cudaGraphLaunch)


@functools.cache
def _replay_address() -> int:
    """CUDAGraph::replay, which tells the kernels of a graph the seeds of its generators. To Python it would be
    `graph.replay`; but a graph is launched by threads that do not hold the GIL."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    return _address(library._ZN2at4cuda9CUDAGraph6replayEv)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
