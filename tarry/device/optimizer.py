"""The end of `optimizer.step()` is the end of a training step.

The step is cut there so that nobody has to write `mark_step`. The hooks are global and public API; they run around
every optimizer of the process, so telling whether one concerns us must cost next to nothing.

Most optimizers count their steps on the host. In eager PyTorch a step that fails is never counted, because its error
comes before `optimizer.step()`; here it comes after. So what an optimizer keeps on the host is noted before each step,
and put back if the step fails.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Steps(Protocol):
    """What the runtime knows of steps and their failures (csrc/failure.h). A lane is the number of a thread."""

    def cut(self) -> None:
        """End the step; an error of an operator may come up here."""

    def land(self) -> None:
        """Wait for a step that was handed over, and raise its error."""

    def settled(self) -> bool:
        """Whether all that was recorded is computed."""

    def lane(self) -> int: ...

    def failed(self, lane: int) -> int:
        """How many steps have failed because of an operator of this lane."""


@dataclass(frozen=True, slots=True)
class HostState:
    """What an optimizer had on the host before a step: its entries per parameter, and the values of its counters."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    entries: list[tuple[torch.Tensor, dict[str, Any] | None]]
    counters: list[tuple[torch.Tensor, bytes]]
    lane: int
    failed: int

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, lane: int, failed: int) -> HostState:
        state = optimizer.state
        entries: list[tuple[torch.Tensor, dict[str, Any] | None]] = []
        counters: list[tuple[torch.Tensor, bytes]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                entry = state.get(parameter)
                if not entry:
                    entries.append((parameter, None))
                    continue
                entries.append((parameter, entry.copy()))
                counters.extend(
                    # Not by an operator: that would cost more, and tarry.compile would take it for the user's.
                    (value, ctypes.string_at(value.data_ptr(), value.element_size()))
                    for value in entry.values()
                    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1
                )
        return HostState(weakref.ref(optimizer), entries, counters, lane, failed)

    def restore(self) -> None:
        optimizer = self.optimizer()
        if optimizer is None:
            return
        for parameter, entry in self.entries:
            if entry is None:
                optimizer.state.pop(parameter, None)
            else:
                now = optimizer.state[parameter]
                now.clear()
                now.update(entry)
        for counter, value in self.counters:
            ctypes.memmove(counter.data_ptr(), value, len(value))


class StepHooks:
    """Cuts a step after each optimizer, and takes back what the optimizer has noted of one that failed."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._running: set[int] = set()  # optimizers whose step runs now
        self._unsettled: list[HostState] = []  # of steps that run, or are still to be computed

        # Plain functions: a replay's guards look at what hooks are bound to.
        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if _is_ours(optimizer):
                self._begin(optimizer)

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if _is_ours(optimizer):
                self._end(optimizer)

        self._handles = (
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        )

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._running.discard(id(optimizer))  # an error has ended its last step
        try:
            if any(state.counters for state in self._unsettled):
                self._steps.land()  # an error must come up before anything more is counted
        finally:
            self.settle()
        lane = self._steps.lane()
        self._unsettled.append(HostState.of(optimizer, lane, self._steps.failed(lane)))
        self._running.add(id(optimizer))

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        self._running.discard(id(optimizer))
        try:
            self._steps.cut()
        finally:
            self.settle()

    def settle(self) -> None:
        """Put back what optimizers have noted of steps that have failed, and forget what is computed."""
        if not self._unsettled:
            return
        states, self._unsettled = self._unsettled, []
        settled = self._steps.settled()
        kept = []
        for before in reversed(states):
            if self._steps.failed(before.lane) > before.failed:
                before.restore()
            elif not settled or id(before.optimizer()) in self._running:
                kept.append(before)
        self._unsettled[:0] = reversed(kept)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Looks at one parameter of each group: groups are made per layer or per module, and those live on one device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type == "tarry":
                return True
            break
    return False
