"""Compiles and never executes: results are zeros. Tests of recording, hashing and caching need nothing more."""

from __future__ import annotations

from tarry.backends.base import Backend, Run
from tarry.ir.graph import Graph


class NullBackend(Backend):
    """Goes through every stage of compilation, then hands out zeros of the recorded shapes."""

    name = "null"

    def compile(self, graph: Graph) -> Run:
        import torch

        layouts = [value.type for value in graph.outputs]
        device = self.device
        return lambda inputs, numbers: [
            torch.empty_strided(t.sizes, t.strides, dtype=t.dtype, device=device).zero_() for t in layouts
        ]
