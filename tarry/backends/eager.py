"""The reference backend: node by node with ATen on the real device, bit for bit what eager PyTorch gives."""

from __future__ import annotations

from tarry.backends.base import Backend, Batch, Computation, Program


def _interpret(batch: Batch) -> None:
    batch.interpret()


class EagerBackend(Backend):
    """Nothing to compile: the native interpreter runs any batch as it was recorded."""

    name = "eager"

    def compile(self, program: Program) -> Computation:
        return _interpret

    def synchronize(self) -> None:
        import torch

        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
