"""`step()` of PyTorch's own SGD, Adam and AdamW, with less Python around its operators.

What PyTorch's code does between its `_foreach` calls takes several times as long as recording them: it collects the
tensors one by one, asks for the value of each step count, and chooses between implementations. `of(optimizer)` does the
same with operations on whole lists, and gives a `FastStep` whose `run()` makes the very calls that PyTorch's code would
make, in its order. It keeps nothing from one step to the next, so nothing can be stale. Whatever is not the plain case
(sparse or missing state, tensors for rates, amsgrad, fused, ...) is left to PyTorch's code: `of` gives None. So are
errors (PyTorch's code raises them), and a step of which any part was replaced.

The calls follow `_multi_tensor_sgd` and `_multi_tensor_adam`, which are private; CHECKED lists the versions that they
were compared with (tests/device/test_fast_step.py compares the recorded graphs). With others, PyTorch's code runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._device import DeviceContext

from tarry.native import C

CHECKED = frozenset({(2, 11), (2, 12), (2, 13), (2, 15)})
"""Versions of PyTorch whose `_multi_tensor` functions make these calls."""

_grad, _is_sparse = attrgetter("grad"), attrgetter("is_sparse")
_PLAIN = frozenset({Tensor, Parameter})
_NUMBERS = frozenset({float, int})


@dataclass(slots=True)
class Counters:
    """Step counts on the host, and their values before the step. They outlive it, and so hold no gradients."""

    tensors: list[Tensor] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the step's counting back. (Its tensors are the device's affair.)"""
        C.write_counters(self.tensors, self.values)


@dataclass(slots=True)
class FastStep:
    """The calls of one step, and the counters that it advances."""

    counters: Counters = field(default_factory=Counters)
    calls: list[Callable[[], None]] = field(default_factory=list)

    def run(self) -> None:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for call in self.calls:
                call()
        finally:
            torch._C._set_grad_enabled(before)


def only_our_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing but tarry's own hooks runs around a step of this optimizer."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return not own and len(_global_optimizer_pre_hooks) == len(_global_optimizer_post_hooks) == 1


def is_torchs(function: Any) -> bool:
    """Whether this is PyTorch's code, also underneath decorators (Dynamo adds some)."""
    while code := getattr(function, "__code__", None):
        if not code.co_filename.startswith(_TORCHS):
            return False
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


def _is_watched() -> bool:
    """Whether a mode sees what PyTorch's code does, and may change it. A default device is one that does not."""
    if torch._C._len_torch_dispatch_stack():
        return True
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return not all(type(mode) is DeviceContext for mode in modes)


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step would run PyTorch's code, without gradients of its own or a gradient scaler's additions."""
    attributes, module = vars(optimizer), sys.modules[type(optimizer).step.__module__]
    return (
        not any(name in attributes for name in ("grad_scale", "found_inf", "_init_group"))
        and not optimizer.defaults["differentiable"]
        and is_torchs(type(optimizer)._init_group)  # type: ignore[attr-defined]
        and all(is_torchs(getattr(module, name)) for name in _FUNCTIONS[module.__name__])
    )


def of(optimizer: torch.optim.Optimizer) -> FastStep | None:
    """The step that the optimizer is about to take, if it is a plain one."""
    prepare = _PREPARE.get(type(optimizer))
    if prepare is None or _is_watched():
        return None
    try:
        return _prepared(optimizer, prepare, FastStep()) if _is_plain(optimizer) else None
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None  # nothing has been changed; PyTorch's code raises what is to be raised, where it is


def take_directly(optimizer: torch.optim.Optimizer) -> bool:
    """Take the step natively at once, if it is a plain one and calls are direct (csrc/device/optimizer_step.h)."""
    prepare = _PREPARE.get(type(optimizer))
    if prepare is None or _is_watched():
        return False
    try:
        return _is_plain(optimizer) and C.take_step_directly(prepare is _adam, optimizer.param_groups, optimizer.state)
    except (AttributeError, LookupError, TypeError):
        return False  # as in of(): nothing has been changed


def _prepared(optimizer: torch.optim.Optimizer, prepare: Callable[..., bool], found: FastStep) -> FastStep | None:
    groups = [[p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
    entries = iter(_entries([*chain.from_iterable(groups)], optimizer.state))
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        if not params:
            continue
        grads = [*map(_grad, params)]
        if any(map(_is_sparse, grads)) or not _PLAIN.issuperset(map(type, params)):
            return None
        if not prepare(found, group, params, grads, [*islice(entries, len(params))]):
            return None
    return found


def _entries(params: list[Any], state: dict[Any, Any]) -> list[Any]:
    """The state of each parameter. Hashing a tensor is slow; in the common case all parameters have an entry, in their
    order."""
    if [*map(id, state)] == [*map(id, params)]:
        return [*state.values()]
    return [state.get(parameter) for parameter in params] if state else [None] * len(params)


def _of_entries(key: str, entries: list[Any]) -> list[Any]:
    return [*map(itemgetter(key), entries)]


def _takes_lists(group: dict[str, Any], *options: str) -> bool:
    """Whether PyTorch's code takes its `_foreach` form, and none of the options that change its calls is set."""
    fused, foreach = group["fused"], group["foreach"]
    default = foreach is None and fused is None
    return bool(default or foreach) and not fused and not any(group[name] for name in ("maximize", *options))


def _are_alike(*lists: list[Tensor]) -> bool:
    """Whether all are of one floating dtype on one device of ours: PyTorch's code makes a call for each group of such,
    and takes those on the CPU one by one."""
    groups = torch._C._group_tensors_by_device_and_dtype([*lists], False)  # type: ignore[list-item]
    if len(groups) != 1:
        return False
    device, dtype = next(iter(groups))
    return device.type == "tarry" and dtype.is_floating_point


def _are_numbers(values: Iterable[Any]) -> bool:
    return _NUMBERS.issuperset(map(type, values))


def _sgd(found: FastStep, group: dict[str, Any], params: list[Any], grads: list[Any], entries: list[Any]) -> bool:
    momentum, decay, rate = group["momentum"], group["weight_decay"], group["lr"]
    dampening, nesterov = group["dampening"], group["nesterov"]
    if not (_takes_lists(group) and _are_numbers((momentum, decay, rate, dampening))):
        return False
    buffers = _of_entries("momentum_buffer", entries) if momentum != 0 else []
    if any(buffer is None for buffer in buffers) or not _are_alike(params, grads, *([buffers] if buffers else [])):
        return False

    def call() -> None:
        update: Any = grads
        if decay != 0:
            update = torch._foreach_add(update, params, alpha=decay)
        if momentum != 0:
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, update, alpha=1 - dampening)
            if nesterov:
                torch._foreach_add_(update, buffers, alpha=momentum)
            else:
                update = buffers
        torch._foreach_add_(params, update, alpha=-rate)

    found.calls.append(call)
    return True


def _adam(found: FastStep, group: dict[str, Any], params: list[Any], grads: list[Any], entries: list[Any]) -> bool:
    beta1, beta2 = group["betas"]
    decay, rate, epsilon = group["weight_decay"], group["lr"], group["eps"]
    numbers = (beta1, beta2, decay, rate, epsilon)
    if not (_takes_lists(group, "differentiable", "amsgrad", "capturable") and _are_numbers(numbers)):
        return False
    averages, squares = _of_entries("exp_avg", entries), _of_entries("exp_avg_sq", entries)
    counters = _of_entries("step", entries)
    counted = C.read_counters(counters)
    if not counted or not _are_alike(params, grads, averages, squares):
        return False
    decoupled = group["decoupled_weight_decay"]
    found.counters.tensors += counters
    found.counters.values += counted

    def call() -> None:
        steps = C.advance_counters(counters)
        update: Any = grads
        if decay != 0:
            if decoupled:
                torch._foreach_mul_(params, 1 - rate * decay)
            else:
                update = torch._foreach_add(update, params, alpha=decay)
        torch._foreach_lerp_(averages, update, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, update, update, 1 - beta2)
        del update
        sizes = {count: ((rate / (1 - beta1**count)) * -1, (1 - beta2**count) ** 0.5) for count in set(steps)}
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [sizes[count][1] for count in steps])
        torch._foreach_add_(roots, epsilon)
        torch._foreach_addcdiv_(params, averages, roots, [sizes[count][0] for count in steps])

    found.calls.append(call)
    return True


_TORCHS = os.path.join(os.path.dirname(torch.__file__), "")
_FUNCTIONS = {
    "torch.optim.sgd": ("sgd", "_multi_tensor_sgd"),
    "torch.optim.adam": ("adam", "_multi_tensor_adam"),
}
"""What `step` of the optimizers in each module calls."""
_ALL: dict[type[torch.optim.Optimizer], Callable[..., bool]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}
_PREPARE = _ALL if tuple(map(int, torch.__version__.split(".")[:2])) in CHECKED else {}
CLASSES = tuple(_PREPARE)
"""The optimizers whose steps may be taken here; a subclass may do more, so only the very class counts."""
