"""Errors that tarry raises, one class per mistake."""

from __future__ import annotations


class TarryError(RuntimeError):
    """The base of tarry's own errors. Errors of PyTorch's operators keep PyTorch's types."""


class NativeBuildError(ImportError):
    """The native part of tarry could not be built or loaded; the message says what to install or change."""


class BackendError(TarryError):
    """A backend is unknown, or did not do what the contract asks of it.

    Failing: `tarry.set_backend("inductr")`. Cured: `tarry.set_backend("eager")`, or register your own with
    `tarry.register_backend` first.
    """


class Unsupported(BackendError):  # noqa: N818 - raised to decline, not to report an error
    """A backend cannot compile something of the graph. Not a fault: the step runs on the reference path instead.

    Raised by a backend's `compile`, with the node (None: the graph as a whole) and the reason.
    """

    def __init__(self, node: object, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


class CollectiveError(TarryError):
    """Ranks of a process group do not agree on a collective, or one of them has failed. It names ranks and lines.

    Failing: `if rank == 0: dist.all_reduce(x)`. Cured: every rank calls it.
    """


class FallbackError(TarryError):
    """An operator would have run eagerly while `tarry.config.fallback` is "error".

    Failing: `tarry.config.fallback = "error"; torch.nonzero(x)`. Cured: avoid the operator (`torch.where` with three
    arguments keeps shapes static), or set `tarry.config.fallback = "allow"` around it.
    """


class RecompileError(TarryError):
    """A step would have needed a new program inside `with tarry.no_recompile():`. All that it was to compute is still
    pending, and is computed when the program reads it after the block.

    Failing: a last, smaller batch of an epoch inside the block. Cured: `DataLoader(..., drop_last=True)`, or one such
    batch before the block, so that its program is there.
    """


class ReplayError(TarryError):
    """A call of a function under `tarry.compile` was recorded to verify its replays, and did otherwise than a replay
    would have done, though nothing had changed that guards can see. Replays since the last verified call may be wrong.
    The call that raises was recorded: what it did to tensors is right.

    Failing: `return x * float(open("scale").read())`. Cured: `return x * scale`, with `scale` an argument.
    """

    def __init__(
        self,
        message: str,
        *,
        function: str = "",
        operator: str | None = None,
        where: str | None = None,
        before: object = None,
        now: object = None,
        call: int = 0,
        replayed: tuple[int, ...] = (),
        last_verified: int = 0,
    ) -> None:
        super().__init__(message)
        self.function = function
        self.operator = operator
        """What was different first, if it was an operator's doing; `where` is its file and line,"""
        self.where = where
        self.before = before
        """... and what was different about it: a number, say."""
        self.now = now
        self.call = call
        """The number of the call that raises, counted from 1;"""
        self.replayed = replayed
        """... of those that were replayed since the last verified one, the first and the last, and how many."""
        self.last_verified = last_verified


class IRError(TarryError):
    """A graph breaks a rule of the intermediate representation: a fault of a pass or a backend, not of the program."""


class CustomOpCheckError(TarryError, AssertionError):
    """`op.check(...)` found that a custom operator does not do what its declaration says. The message lists all faults.

    Failing: `return x` in a kernel of an operator declared as `(Tensor x) -> Tensor`. Cured: `return x.clone()`.
    """
