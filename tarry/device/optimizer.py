"""The end of `optimizer.step()` is the end of a training step.

The step is cut there so that nobody has to write `mark_step`. The hook is global and public API; it runs after every
optimizer of the process, so telling whether one concerns us must cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def _is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Looks at one parameter of each group: groups are made per layer or per module, and those live on one device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type == "tarry":
                return True
            break
    return False


def install(cut: Callable[[], None]) -> torch.utils.hooks.RemovableHandle:
    """Have `cut()` called after each step of an optimizer of tarry parameters; the handle's `remove()` ends it."""

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _is_ours(optimizer):
            cut()

    return register_optimizer_step_post_hook(after_step)
