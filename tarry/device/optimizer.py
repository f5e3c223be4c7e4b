"""The end of `optimizer.step()` is the end of a training step.

The step is cut there so that programs need no `mark_step`. The hooks are global and public API; they run around
every optimizer of the process, so telling whether one concerns us must cost next to nothing.

Most optimizers count their steps on the host. In eager PyTorch a step that fails is never counted, because its error
comes before `optimizer.step()`; here it comes after. So what an optimizer keeps on the host is noted before each step,
and put back if the step fails.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tarry.device import fast_step
from tarry.native import C


class Steps(Protocol):
    """What the runtime does around a step of an optimizer."""

    def cut(self) -> None:
        """End the step; an error of an operator may come up here."""

    def finish(self) -> None:
        """Wait for a step that was handed over, and raise its error."""

    def is_observed(self) -> bool:
        """Whether this thread is inside a function that `tarry.compile` looks at, or that PyTorch compiles."""


@dataclass(slots=True)
class Unsettled:
    """A step of an optimizer that may still fail, and what to put back then."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    restore: Callable[[torch.optim.Optimizer], None]
    counts: bool
    """Whether the optimizer counts its steps on the host."""
    lane: int
    failed: int
    """How many steps of the lane had failed before."""
    epochs: list[int] | None = None
    """The epochs in which the step was recorded, at the latest; None while it runs."""

    def has_failed(self, failures: list[tuple[int, int]]) -> bool:
        """Whether an operator failed that was recorded before the end of this step."""
        new = failures[self.failed :]
        return bool(new) if self.epochs is None else any(epoch <= self.epochs[device] for device, epoch in new)

    def put_back(self) -> None:
        optimizer = self.optimizer()
        if optimizer is not None:
            self.restore(optimizer)


@dataclass(slots=True)
class HostState:
    """What an optimizer has on the host: its entries, and the values of its counters."""

    entries: dict[Any, Any]
    groups: list[dict[str, int]]
    counters: list[tuple[torch.Tensor, bytes]]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> HostState:
        entries = {key: _copied(entry) for key, entry in optimizer.state.items()}
        groups = [{k: value for k, value in group.items() if type(value) is int} for group in optimizer.param_groups]
        counters = [
            # Not by an operator: that would cost more, and tarry.compile would take it for the user's.
            (value, ctypes.string_at(value.data_ptr(), value.element_size()))
            for entry in entries.values()
            if isinstance(entry, dict)
            for value in entry.values()
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1
        ]
        return HostState(entries, groups, counters)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        for key in [key for key in optimizer.state if key not in self.entries]:
            del optimizer.state[key]
        for key, entry in self.entries.items():
            now = optimizer.state.get(key)
            if isinstance(now, dict) and isinstance(entry, dict):
                now.clear()
                now.update(entry)
            else:
                optimizer.state[key] = entry
        for group, numbers in zip(optimizer.param_groups, self.groups, strict=False):
            group.update(numbers)
        for counter, value in self.counters:
            ctypes.memmove(counter.data_ptr(), value, len(value))


def _copied(entry: Any) -> Any:
    """A copy of an entry that later changes to the entry, or to lists in it, do not reach. Tensors are the same."""
    if isinstance(entry, dict):
        return {key: value.copy() if isinstance(value, list) else value for key, value in entry.items()}
    return entry.copy() if isinstance(entry, list) else entry


class StepHooks:
    """Cuts a step after each optimizer, and takes back what the optimizer has noted of one that failed."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._unsettled: list[Unsettled] = []  # of steps that run, or are still to be computed; of all threads
        self._lock = threading.RLock()  # for the list; a collection that sets in may come back here

        # Plain functions: a replay's guards look at what hooks are bound to.
        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if _is_ours(optimizer):
                self.begin(optimizer)

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if _is_ours(optimizer):
                self.end(optimizer)

        self._handles = (
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        )

    def guard_grad_scaler(self) -> None:
        """Have GradScaler forget that it has unscaled gradients, if its step finds that they could not be computed: it
        would take the next ones for unscaled. (Private: `_per_optimizer_states`; seen in torch 2.11 and 2.13.)"""
        scaled_step = torch.amp.GradScaler.step

        @functools.wraps(scaled_step)
        def step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            lane = C.current_lane()
            failed = len(C.failed_steps(lane)) if _is_ours(optimizer) else 0
            try:
                return scaled_step(scaler, optimizer, *args, **kwargs)
            except BaseException:
                if _is_ours(optimizer) and len(C.failed_steps(lane)) > failed:
                    scaler._per_optimizer_states.pop(id(optimizer), None)
                raise

        torch.amp.GradScaler.step = step  # type: ignore[method-assign, assignment]

    def speed_up(self) -> None:
        """Have PyTorch's own optimizers take their plain steps with less Python (fast_step.py)."""
        # AdamW has the step of Adam, and must keep it: a program that replaces Adam's replaces both.
        originals = {class_: vars(class_)["step"] for class_ in fast_step.CLASSES if "step" in vars(class_)}
        for class_, original in originals.items():
            if fast_step.is_torchs(original):
                class_.step = self._faster(original)  # type: ignore[method-assign]

    def _faster(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_hooked = hasattr(original, "hooked")
        hooked = original if is_hooked else torch.optim.Optimizer.profile_hook_step(original)

        @functools.wraps(original)
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not (torch.compiler.is_compiling() or args or kwargs) and self._take_fast_step(optimizer):
                return None
            # A class with a step of its own, which calls this one, has had its hooks called already.
            outer = getattr(type(optimizer).step, "__code__", None)
            run = original if outer is hooked.__code__ and not is_hooked else hooked
            return run(optimizer, *args, **kwargs)

        step.__dict__["hooked"] = True  # by which PyTorch knows a step that calls the hooks
        return step

    def _take_fast_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has taken its step. Hooks of others, profilers and compilers see PyTorch's own code."""
        if (
            not _is_ours(optimizer)
            or not fast_step.only_our_hooks(optimizer)
            or torch.autograd.profiler._is_profiler_enabled
            or self._steps.is_observed()
        ):
            return False
        self._prepare(optimizer)
        if C.may_call_directly() and fast_step.take_directly(optimizer):
            self._cut()  # nothing of it can fail later
            return True
        fast = fast_step.of(optimizer)
        if fast is None:
            return False
        self._begin(optimizer, fast.counters.restore, bool(fast.counters.tensors))
        fast.run()
        self.end(optimizer)
        return True

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to take its step. A function of its own, with `end`: Dynamo must not trace them."""
        self._prepare(optimizer)
        state = HostState.of(optimizer)
        self._begin(optimizer, state.restore, bool(state.counters))

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            if any(step.counts for step in self._unsettled):
                self._steps.finish()  # an error must come up before anything more is counted
        finally:
            self.settle(optimizer)

    def _begin(
        self, optimizer: torch.optim.Optimizer, restore: Callable[[torch.optim.Optimizer], None], counts: bool
    ) -> None:
        lane = C.current_lane()
        step = Unsettled(weakref.ref(optimizer), restore, counts, lane, len(C.failed_steps(lane)))
        with self._lock:
            # A step of this optimizer that still runs is one that an error of another kind has ended.
            ended = (s for s in self._unsettled if s.epochs is not None or s.optimizer() is not optimizer)
            self._unsettled = [*ended, step]

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        epochs = [C.epochs(index)[0] for index in range(C.device_count())]
        with self._lock:
            for state in self._unsettled:
                if state.epochs is None and state.optimizer() is optimizer:
                    state.epochs = epochs
        try:
            if not _in_step_of_another():
                self._steps.cut()
        finally:
            self.settle()

    def _cut(self) -> None:
        if not _in_step_of_another():
            self._steps.cut()

    def settle(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Put back what optimizers have noted of steps that have failed, and forget what is computed: of this thread's
        steps, and of those of the optimizer that it is about to use. Other threads may be in the middle of a step."""
        if not self._unsettled:
            return
        kept = []
        for state in reversed(self._take(optimizer)):
            if state.has_failed(C.failed_steps(state.lane)):
                state.put_back()
            elif state.epochs is None or not _are_computed(state.epochs):
                kept.append(state)
        self._put_back(kept[::-1])

    def _take(self, optimizer: torch.optim.Optimizer | None) -> list[Unsettled]:
        """Take out what is this thread's to settle, and what is left of an optimizer that is gone."""
        lane = C.current_lane()
        with self._lock:
            states, self._unsettled = self._unsettled, []
            taken: list[Unsettled] = []
            for state in states:
                used = state.optimizer()
                if used is not None:
                    (taken if state.lane == lane or used is optimizer else self._unsettled).append(state)
            return taken

    def _put_back(self, states: list[Unsettled]) -> None:
        with self._lock:
            self._unsettled += states

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _are_computed(epochs: list[int]) -> bool:
    """Whether these epochs, one of each device, are computed."""
    return all(C.epochs(index)[1] > epoch for index, epoch in enumerate(epochs))


def _is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Looks at one parameter of each group: groups are made per layer or per module, and those live on one device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type == "tarry":
                return True
            break
    return False


_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


def _in_step_of_another() -> bool:
    """Whether an optimizer, whose step has just ended, was called by the step of another, which will end as well."""
    outer = sys._getframe(3).f_back  # 3: its own step, which has called a hook or a function of this module
    while outer is not None and outer.f_code is not _HOOKED_STEP:
        outer = outer.f_back
    return outer is not None
