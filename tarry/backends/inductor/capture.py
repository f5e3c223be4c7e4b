"""A compiled program on a CUDA device as one CUDA graph.

A launch of the whole graph costs as much as a few launches of kernels. A graph reads and writes fixed addresses, so its
inputs are sorted: those that were in the same place twice are read there (parameters, optimizer state: updated where
they are), and others are copied to placeholders before each launch. If an input turns out to have moved, the graph is
captured anew; one that moves again gets a placeholder. Launching is native (csrc/captured.h).

Checked on torch 2.11 and 2.13: CUDAGraph.raw_cuda_graph_exec.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tarry.backends.base import PythonNumber
from tarry.backends.fx import FxProgram
from tarry.native import C

log = logging.getLogger("tarry")

RUNS_BEFORE = 2
"""Runs before a program is captured: kernels choose their configurations in the first, and what moves is seen in the
second."""
MAX_CAPTURES = 6
"""Captures of one program. One whose inputs keep moving all the same is not captured any more."""


class Capture:
    """Runs a program kernel by kernel until it can be captured. `program` then takes over, for as long as its inputs
    are where they were."""

    def __init__(
        self, program: FxProgram, compiled: Callable[[list[Any]], Sequence[Any]], counts: Counter[str]
    ) -> None:
        self._fx = program
        self._counts = counts
        self._compiled = compiled
        self._runs = 0
        self._captures = 0
        self._places: list[int] = []
        self._moves: Counter[int] = Counter()
        replaces = program.graph.replaces
        self._updated = {index for k, index in enumerate(replaces) if k in program.in_place and index is not None}
        self._returned = [k for k in range(len(program.graph.outputs)) if k not in program.in_place]
        self._why_not = ""
        self._give_up(_why_not(program))
        self.program: Any = C.CapturedProgram()

    def run(self, inputs: list[Any], numbers: list[PythonNumber]) -> list[Any]:
        """Compute the results by the graph if it takes the inputs, else kernel by kernel; the program is then captured
        for inputs in these places, if the time has come."""
        if self.program.accepts(inputs):
            made: list[Any] = self.program.run(inputs, numbers)
            return made
        given = list(inputs)
        results = self._compiled([*given, *self._fx.number_tensors(numbers)])
        self._runs += 1
        if not self._why_not:
            self._look(given)
            if self._runs >= RUNS_BEFORE:
                self._capture(given, numbers)
        outputs: list[Any] = [None] * len(self._fx.graph.outputs)
        for k, result in zip(self._returned, results, strict=True):
            outputs[k] = result
        return outputs

    def _look(self, inputs: list[torch.Tensor]) -> None:
        places = [tensor.data_ptr() for tensor in inputs]
        if self._places:
            self._moves.update(k for k, (a, b) in enumerate(zip(self._places, places, strict=True)) if a != b)
        self._places = places

    @property
    def _moving(self) -> set[int]:
        return {k for k, moves in self._moves.items() if moves > 1}

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

    def _give_up(self, why: str) -> None:
        self._why_not = why
        if why:
            self._counts["not_captured"] += 1
            log.info("a step of %d operators is no CUDA graph: %s", len(self._fx.graph.nodes), why)

    def _set_graph(self, inputs: list[torch.Tensor], numbers: list[PythonNumber]) -> None:
        fx = self._fx
        moving = self._moving
        placeholders = [_like(tensor) if k in moving else None for k, tensor in enumerate(inputs)]
        given = [tensor if place is None else place for tensor, place in zip(inputs, placeholders, strict=True)]
        vectors = fx.number_tensors(numbers)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(inputs[0].device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = self._compiled([*given, *vectors])
        theirs = {tensor.untyped_storage().data_ptr() for tensor in (*given, *vectors)}
        if any(result.untyped_storage().data_ptr() in theirs for result in results):
            raise RuntimeError("a result lies in the memory of an input")
        outputs: list[torch.Tensor | None] = [None] * len(fx.graph.outputs)
        for k, result in zip(self._returned, results, strict=True):
            outputs[k] = result
        self.program.set_graph(
            _launch_address(),
            graph.raw_cuda_graph_exec(),
            graph,
            [0 if k in moving else place for k, place in enumerate(self._places)],
            placeholders,
            sorted(moving & self._updated),
            [(vector.dtype, vector.indices) for vector in fx.vectors],
            vectors,
            outputs,
        )


def _why_not(program: FxProgram) -> str:
    """Why a program cannot be captured, as far as can be told without trying; empty if it can."""
    if any(vector.device.type == "cpu" for vector in program.vectors):
        return "a number is needed on the host (a seed of a random operator, say)"
    if not program.graph.inputs:
        return "it has no inputs"
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
        return f"torch {torch.__version__} does not give access to captured graphs"
    return ""


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


@functools.cache
def _launch_address() -> int:
    """The function of the CUDA runtime that launches a graph, from the library that torch has loaded."""
    major = str(torch.version.cuda).split(".")[0]
    library = ctypes.CDLL(f"libcudart.so.{major}")
    address = ctypes.cast(library.cudaGraphLaunch, ctypes.c_void_p).value
    assert address is not None
    return address
