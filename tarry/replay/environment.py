"""What a step function depends on besides its arguments, and whether it is still the same.

Starting from the function, everything is looked at that its code can name: closure cells, globals, defaults, `self`,
and from there modules, optimizers, containers, and the attributes that the code reads. Each place that is found becomes
a check, carried out natively before each replay.

Plain values (numbers, strings, ...) are compared by value, all else by identity. Parameters, buffers and optimizer
state are compared down to their storage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._device import DeviceContext  # private; checked on torch 2.11 and 2.13

from tarry.replay.contents import PLAIN, Contents
from tarry.replay.counts import host_counts
from tarry.replay.walk import Walk

_MISSING = object()


def default_devices() -> tuple[str, ...] | None:
    """The devices that `torch.set_default_device` and `with torch.device(...)` have chosen; None under any other mode
    that sees functions called or operators run, and that wants to see them. Private names; checked on 2.11 and 2.13."""
    if torch._C._len_torch_function_stack() == 0 and torch._C._len_torch_dispatch_stack() == 0:
        return ()
    modes = torch.overrides._get_current_function_mode_stack()
    if torch._C._len_torch_dispatch_stack() or not all(isinstance(mode, DeviceContext) for mode in modes):
        return None
    return tuple(str(mode.device) for mode in modes)


class Environment:
    """The surroundings of a function at one moment."""

    def __init__(self, function: Any, arguments: list[Any]) -> None:
        walk = Walk(function)
        walk.all(arguments)
        while not walk.is_complete():  # an attribute's name may turn up in code that another attribute leads to
            walk = walk.again()
            walk.all(arguments)
        self._walk = walk
        self.tensors: list[torch.Tensor] = list(walk.tensors.values())
        self.names: dict[int, str] = {id(t): walk.tensor_paths[k] for k, t in walk.tensors.items()}
        self._devices = default_devices()
        self._host_versions = [(t, t._version) for t in self.tensors if t.device.type != "tarry"]
        self.counts = {id(count): optimizer for optimizer in walk.optimizers for count in host_counts(optimizer)}
        """Of steps, on the host, by id."""

    @property
    def rates(self) -> list[dict[str, Any]]:
        """Parameter groups whose learning rates can be followed."""
        return [] if self._walk.looks_at_rates else self._walk.rates

    def __len__(self) -> int:
        return len(self._walk.guard)

    def failing(self, with_gradients: bool = True, with_counts: bool = True, with_rates: bool = True) -> int:
        """The number of the first check that fails, -1 if all hold, less if something is switched on or off. Without
        gradients, these may have come and gone; without counts, optimizers may have counted steps; without rates,
        learning rates that can be followed may be others."""
        if default_devices() != self._devices:
            return -2
        if self._host_versions and self.changed_host_tensor(with_counts) is not None:
            return -3
        found: int = self._walk.guard.failing(with_gradients, with_rates or self._walk.looks_at_rates)
        return found

    def is_value(self, check: int) -> bool:
        """Whether a check compares a plain value, or what is switched on: such a change may well be undone."""
        return check < 0 or isinstance(self._walk.checks[check][2], PLAIN)

    def explain(self, check: int) -> str:
        """What has changed, in one line."""
        if check == -3:
            return f"{self.changed_host_tensor()}, a tensor on the host, was changed"
        if check < 0:
            return "grad mode, autocast, a dispatch mode, the default dtype or another such setting has changed"
        path, kind, expected = self._walk.checks[check]
        obj = self._walk.objects[check]
        if kind == "tensor":
            return f"{path} has another shape, type, storage, requires_grad or hooks, or its .grad was set or cleared"
        if kind == "length":
            return f"{path} had {expected} entries and has {len(obj)} now"
        if kind == "entries":
            rate = self._walk.keys[check]
            return _explain_entries(path, expected, {key: value for key, value in obj.items() if key is not rate})
        if isinstance(obj, Contents):  # which may be long, or secret
            return f"{path} are others now"
        now = _look(kind, obj, self._walk.keys[check])
        if isinstance(expected, PLAIN) and isinstance(now, PLAIN):
            return f"{path} was {expected!r} and is {now!r} now"
        return f"{path} is another object now"

    def drawn_from(self) -> str | None:
        """The name of a generator of random numbers on the host that was used since."""
        for path, read, state in self._walk.generators:
            if read() != state:
                return path
        return None

    def changed_host_tensor(self, with_counts: bool = True) -> str | None:
        """The name of a host tensor that was written since."""
        for tensor, version in self._host_versions:
            if tensor._version != version and (with_counts or id(tensor) not in self.counts):
                return self.names[id(tensor)]
        return None

    def counted_on_host(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have counted steps on the host since."""
        written = {id(tensor) for tensor, version in self._host_versions if tensor._version != version}
        return list(dict.fromkeys(optimizer for count, optimizer in self.counts.items() if count in written))


def _look(kind: str, obj: Any, key: Any) -> Any:
    try:
        if kind == "cell":
            return obj.cell_contents
        return getattr(obj, key) if kind == "attribute" else obj[key]
    except (AttributeError, KeyError, IndexError, ValueError):
        return _MISSING


def _explain_entries(path: str, before: dict[Any, Any], now: dict[Any, Any]) -> str:
    if len(before) != len(now):
        return f"{path} had {len(before)} entries and has {len(now)} now"
    for key, value in before.items():
        name = repr(key) if isinstance(key, PLAIN) else "..."
        if key not in now:
            return f"{path}[{name}] is gone"
        if isinstance(value, PLAIN) and isinstance(now[key], PLAIN):
            if repr(now[key]) != repr(value):
                return f"{path}[{name}] was {value!r} and is {now[key]!r} now"
        elif now[key] is not value:
            return f"{path}[{name}] is another object now"
    return f"{path} has its entries in another order"
