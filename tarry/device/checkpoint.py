"""Marks what is recorded while activation checkpointing recomputes.

Recomputation records, inside backward, the very operators that forward recorded. Merging the two as common
subexpressions would keep every activation alive from forward to backward, and so undo what the user asked for. Each
recomputation therefore gets a *region*: a number that its nodes carry. Nodes of different regions must not be merged.

Regions are numbered from 1 within a backward pass, so that every step of a training loop numbers them alike and finds
its graph in the cache. Number 0 is everything outside.

Private names used, in `torch.utils.checkpoint`, seen in torch 2.11 to 2.15:
 - `CheckpointFunction.backward(ctx, *grads)` (reentrant), which calls `ctx.run_function` to recompute;
 - `_recomputation_hook` (non-reentrant), a context manager around the recomputation alone;
 - `torch._C._current_graph_task_id()`, which tells backward passes apart.
Where one is missing, that kind of checkpointing records without regions: still right, with more memory in use.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from tarry.native import C


class _Numbering(threading.local):
    """Numbers the regions of a backward pass, which stays in one thread (but for extremely deep nesting)."""

    def __init__(self) -> None:
        self.task = -1  # the backward pass that `last` belongs to
        self.last = 0
        self.nesting = 0  # reentrant checkpoints whose backward is running: what they start belongs to the same pass

    def next(self) -> int:
        if self.nesting == 0:
            current = getattr(torch._C, "_current_graph_task_id", None)
            task = -1 if current is None else current()
            if task == -1 or task != self.task:
                self.task = task
                self.last = 0
        self.last += 1
        return self.last


_numbering = _Numbering()


def install() -> None:
    """Set the recorder's region when a recomputation begins, and set it back when it ends."""
    _wrap_reentrant()
    _wrap_non_reentrant()


def _wrap_reentrant() -> None:
    function = getattr(torch_checkpoint, "CheckpointFunction", None)
    original = getattr(function, "backward", None)
    if function is None or original is None or hasattr(original, "_tarry"):
        return

    @functools.wraps(original)
    def backward(ctx: Any, *grads: Any) -> Any:
        run_function = getattr(ctx, "run_function", None)
        if run_function is None:
            return original(ctx, *grads)
        region = _numbering.next()

        @functools.wraps(run_function)
        def recompute(*args: Any, **kwargs: Any) -> Any:
            previous = C.set_region(region)
            try:
                return run_function(*args, **kwargs)
            finally:
                C.set_region(previous)

        ctx.run_function = recompute
        _numbering.nesting += 1
        try:
            return original(ctx, *grads)
        finally:
            _numbering.nesting -= 1
            ctx.run_function = run_function

    backward._tarry = True  # type: ignore[attr-defined]
    function.backward = staticmethod(backward)


def _wrap_non_reentrant() -> None:
    original = getattr(torch_checkpoint, "_recomputation_hook", None)
    if original is None or hasattr(original, "_tarry"):
        return

    class RecomputationHook(original):  # type: ignore[misc, valid-type]
        _tarry = True

        def __enter__(self) -> Any:
            self._outer_region = C.set_region(_numbering.next())
            return super().__enter__()

        def __exit__(self, *exc_info: object) -> Any:
            try:
                return super().__exit__(*exc_info)
            finally:
                C.set_region(self._outer_region)

    torch_checkpoint._recomputation_hook = RecomputationHook  # type: ignore[misc]
