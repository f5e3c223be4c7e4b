"""Backends for tests alone: each runs the IR of a stage, node by node, instead of the recorder's own interpretation.

With them the surveys and the random programs judge the graph builder and the passes on everything that runs:
``python -m tests.ops.survey --backend ir-optimized``, or ``TARRY_TEST_BACKEND=ir-optimized pytest tests/programs``.
"""

from __future__ import annotations

import functools

import tarry
from tarry.backends.base import Run
from tarry.ir.evaluate import evaluate
from tarry.ir.graph import Graph


class StageBackend(tarry.Backend):
    """Compiles a step to the graph of one stage; running it is evaluating that graph."""

    def __init__(self, device: str = "cpu", *, stage: str) -> None:
        super().__init__(device)
        self.name = f"ir-{stage}"
        self.stage = stage

    def compile(self, graph: Graph) -> Run:
        return lambda inputs, numbers: evaluate(graph, inputs, numbers)


def register() -> None:
    """Make ``ir-recorded`` and ``ir-optimized`` known by name."""
    for stage in ("recorded", "optimized"):
        tarry.register_backend(f"ir-{stage}", functools.partial(StageBackend, stage=stage))
