"""Backends for tests alone: each runs the IR of a stage, node by node, instead of the recorder's own interpretation.

With them the surveys and the random programs judge the graph builder and the passes on everything that runs:
``python -m tests.ops.survey --backend ir-optimized``, or ``TARRY_TEST_BACKEND=ir-optimized pytest tests/programs``.
"""

from __future__ import annotations

import functools

import torch

import tarry
from tarry.backends.base import Batch, Computation, Program
from tarry.ir.evaluate import evaluate
from tarry.ir.layout import TensorType


def _exactly(tensor: torch.Tensor, promised: TensorType) -> torch.Tensor:
    """The tensor with the strides that were recorded, also where they lead nowhere (sizes of 0 and 1)."""
    if tensor.stride() == promised.strides:
        return tensor
    return torch.empty_strided(promised.sizes, promised.strides, dtype=tensor.dtype).copy_(tensor)


class StageBackend(tarry.Backend):
    """Compiles a step to the graph of one stage; running it is evaluating that graph."""

    def __init__(self, device: str = "cpu", *, stage: str) -> None:
        super().__init__(device)
        self.name = f"ir-{stage}"
        self.stage = stage

    def compile(self, program: Program) -> Computation:
        graph = program.graph(self.stage)

        def compute(batch: Batch) -> None:
            results = evaluate(graph, batch.inputs(), batch.numbers())
            batch.commit([_exactly(t, value.type) for t, value in zip(results, graph.outputs, strict=True)])

        return compute


def register() -> None:
    """Make ``ir-recorded`` and ``ir-optimized`` known by name."""
    for stage in ("recorded", "optimized"):
        tarry.register_backend(f"ir-{stage}", functools.partial(StageBackend, stage=stage))
