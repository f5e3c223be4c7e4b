"""Optimizers that count their steps on the host.

Adam and its kin do so unless they are `capturable`: the count is a tensor on the host, and what follows from it are
numbers that change with every step. Nothing in that could be replayed. PyTorch has the remedy: with `capturable=True`
the count is on the device, and so is all that follows from it, computed in the count's own precision.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_torchs(obj: object) -> bool:
    """Whether an object is of one of PyTorch's own classes."""
    return type(obj).__module__.partition(".")[0] == "torch"


def host_counts(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The counts that an optimizer has on the host and could have on the device."""
    if not is_torchs(optimizer):
        return []
    groups = filter(_may_move, optimizer.param_groups)
    states = [optimizer.state.get(parameter, {}) for group in groups for parameter in group["params"]]
    return [value for state in states for value in state.values() if _is_count(value)]


def count_on_device(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Have the optimizers count on the device of their parameters, as with `capturable=True`."""
    for optimizer in optimizers:
        # With a GPU around, it would warn that it is capturable for nothing (seen in torch 2.11 to 2.13).
        optimizer.__dict__["_warned_capturable_if_run_uncaptured"] = True
        for group in filter(_may_move, optimizer.param_groups):
            group["capturable"] = optimizer.defaults["capturable"] = True
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                state.update({key: v.to(parameter.device) for key, v in state.items() if _is_count(v)})


def _may_move(group: dict[str, object]) -> bool:
    parameters = group["params"]
    assert isinstance(parameters, list)
    asked_otherwise = group.get("capturable", True) or group.get("fused") or group.get("differentiable")
    return not asked_otherwise and all(p.device.type == "tarry" for p in parameters)


def _is_count(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() == 0
