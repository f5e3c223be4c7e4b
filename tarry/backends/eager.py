"""The reference backend: node by node with ATen on the real device, bit for bit what eager PyTorch gives."""

from __future__ import annotations

import signal

from tarry.backends.base import Backend, Batch, Program, Step


def _interpret(batch: Batch) -> None:
    batch.interpret(interruptible=_only_default_handlers())


def _only_default_handlers() -> bool:
    """Whether an interrupt can only end the program: a handler of the user's might ask for values in mid-step."""
    return (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    )


class EagerBackend(Backend):
    """Nothing to compile: the native interpreter runs any batch as it was recorded."""

    name = "eager"

    def prepare(self, program: Program) -> Step:
        return _interpret
