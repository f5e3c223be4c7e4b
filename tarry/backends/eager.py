"""The reference backend: node by node with ATen on the real device, bit for bit what eager PyTorch gives."""

from __future__ import annotations

# `signal` without its enumerations, which cost more than the calls: this is done every step.
import _signal  # type: ignore[import-not-found]

from tarry.backends.base import Backend, Batch, Recording, Step


def _interpret(batch: Batch) -> None:
    batch.interpret(interruptible=_only_default_handlers())


def _only_default_handlers() -> bool:
    """Whether an interrupt can only end the program: a handler of the user's might ask for values in mid-step."""
    return (
        _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
        and _signal.getsignal(_signal.SIGTERM) is _signal.SIG_DFL
        and _signal.getsignal(_signal.SIGUSR1) is _signal.SIG_DFL
        and _signal.getsignal(_signal.SIGALRM) is _signal.SIG_DFL
    )


class EagerBackend(Backend):
    """Nothing to compile: the native interpreter runs any batch as it was recorded."""

    name = "eager"

    def prepare(self, recording: Recording) -> Step:
        return _interpret
