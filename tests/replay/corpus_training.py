"""Steps under torch's modes, and training steps whose module, optimizer or hooks change."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.replay.corpus import CHANGE, STEPS, at, trained, values
from tests.replay.hostile import Case, Make

# ---- what is switched on around a step

MODES: dict[str, Callable[[str], Any]] = {
    "no_grad": lambda device: torch.no_grad(),
    "inference_mode": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "autocast_off": lambda device: torch.autocast(device, enabled=False),
    "float64": lambda device: _setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default_device": lambda device: torch.device(device),
    "deterministic": lambda device: _setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "anomaly": lambda device: torch.autograd.set_detect_anomaly(True),
    "saved_tensors": lambda device: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t),
    "precision": lambda device: _setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "attention": lambda device: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "function_mode": lambda device: _Doubling(),
    "dispatch_mode": lambda device: _DoublingDispatch(),
    "multithreading": lambda device: torch.autograd.set_multithreading_enabled(False),
    "set_grad": lambda device: torch.set_grad_enabled(False),
}


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if getattr(func, "__name__", "") == "tanh" else result


class _DoublingDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if "tanh" in str(func) and "backward" not in str(func) else result


@contextlib.contextmanager
def _setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Any:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def _in_mode(mode: Callable[[str], Any], inside: bool) -> Make:
    """A step under a mode, in some of its calls: chosen outside of it, or in it by what no guard sees."""

    def make(device: str) -> Case:
        torch.manual_seed(0)
        weight = torch.randn(3, 3).to(device).requires_grad_()
        chosen = ctypes.py_object(False)
        calls = [0]

        def compute(x: Tensor) -> Any:
            y = F.scaled_dot_product_attention((x @ weight).tanh()[None], x[None], x[None])
            y = y * torch.ones(3, device=x.device)
            return y.detach(), y.requires_grad

        def within(x: Tensor) -> Any:
            with mode(device) if chosen.value else contextlib.nullcontext():
                return compute(x)

        def before(k: int) -> None:
            calls[0] = k
            chosen.value = CHANGE <= k < 20

        return Case(
            within if inside else compute,
            before=before,
            around=None if inside else lambda k: mode(device) if CHANGE <= k < 20 else contextlib.nullcontext(),
        )

    return make


STEPS |= {f"under_{name}": _in_mode(mode, inside=False) for name, mode in MODES.items()}
STEPS |= {f"within_{name}": _in_mode(mode, inside=True) for name, mode in MODES.items() if name != "inference_mode"}


# ---- modules and optimizers

EVENTS: dict[str, Callable[[Any, Any, str], object]] = {
    "eval": lambda m, o, d: m.eval(),
    "frozen": lambda m, o, d: m[0].weight.requires_grad_(False),
    "all_frozen": lambda m, o, d: m[2].requires_grad_(False),
    "data_swapped": lambda m, o, d: setattr(m[0].weight, "data", torch.ones(4, 3, device=d)),
    "data_in_place": lambda m, o, d: m[0].weight.data.mul_(2),
    "data_transposed": lambda m, o, d: setattr(m[0].weight, "data", torch.ones(3, 4, device=d).t()),
    "parameter_new": lambda m, o, d: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 3, device=d))),
    "parameter_deleted": lambda m, o, d: setattr(m[2], "bias", None),
    "buffer_new": lambda m, o, d: m.register_buffer("extra", torch.ones(2, device=d)),
    "module_new": lambda m, o, d: m.__setitem__(1, nn.ReLU()),
    "module_more": lambda m, o, d: m.append(nn.Tanh()),
    "double": lambda m, o, d: m[0].register_forward_hook(lambda m, i, o: o * 2),
    "pre_hook": lambda m, o, d: m[2].register_forward_pre_hook(lambda m, i: (i[0] * 2,)),
    "backward_hook": lambda m, o, d: m[2].register_full_backward_hook(lambda m, i, o: (i[0] * 2,)),
    "backward_pre_hook": lambda m, o, d: m[2].register_full_backward_pre_hook(lambda m, o: (o[0] * 2,)),
    "tensor_hook": lambda m, o, d: m[0].weight.register_hook(lambda g: g * 2),
    "grad_hook": lambda m, o, d: m[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2)),
    "forward_replaced": lambda m, o, d: setattr(m[1], "forward", lambda x: x * 3),
    "class_forward": lambda m, o, d: setattr(m[1], "__class__", nn.ReLU),
    "loaded": lambda m, o, d: m.load_state_dict({k: torch.ones_like(v) for k, v in m.state_dict().items()}),
    "assigned": lambda m, o, d: m.load_state_dict(
        {k: torch.ones_like(v) for k, v in m.state_dict().items()}, assign=True
    ),
    "optimizer_loaded": lambda m, o, d: o.load_state_dict(o.state_dict()),
    "lr": lambda m, o, d: o.param_groups[0].update(lr=0.02),
    "lr_tensor": lambda m, o, d: o.param_groups[0].update(lr=torch.tensor(0.02)),
    "weight_decay": lambda m, o, d: o.param_groups[0].update(weight_decay=0.5),
    "maximize": lambda m, o, d: o.param_groups[0].update(maximize=True, lr=1e-3),
    "foreach": lambda m, o, d: o.param_groups[0].update(foreach=False),
    "group_shorter": lambda m, o, d: o.param_groups[0]["params"].pop(),
    "groups_swapped": lambda m, o, d: o.param_groups.reverse(),
    "group_more": lambda m, o, d: o.add_param_group({"params": [nn.Parameter(torch.ones(2, device=d))]}),
    "state_cleared": lambda m, o, d: o.state.clear(),
    "state_dict_of_one": lambda m, o, d: o.state.pop(m[0].weight, None),
    "optimizer_hook": lambda m, o, d: o.register_step_post_hook(lambda *_: m[0].weight.data.mul_(0.5)),
    "optimizer_pre_hook": lambda m, o, d: o.register_step_pre_hook(lambda *_: m[0].weight.grad.mul_(2)),
    "grad_left": lambda m, o, d: m[0].weight.__setattr__("grad", torch.ones(4, 3, device=d)),
    "grad_none": lambda m, o, d: m.zero_grad(set_to_none=True),
    "half": lambda m, o, d: m.to(torch.float64).to(torch.float32),
    "moved": lambda m, o, d: m.to("cpu").to(d),
    "compiled_hooks": lambda m, o, d: m[0]._forward_hooks.update({10**6: lambda m, i, o: o + 1}),
    "step_replaced": lambda m, o, d: setattr(o, "step", lambda: None),
    "tied": lambda m, o, d: setattr(m[0], "bias", nn.Parameter(m[0].bias.detach() * 1)),
    "detached_state": lambda m, o, d: [
        s.update({k: v.clone() for k, v in s.items() if isinstance(v, Tensor)}) for s in o.state.values()
    ],
    "contents_of_state": lambda m, o, d: [
        v.add_(0.1) for s in o.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()
    ],
    "parametrized": lambda m, o, d: nn.utils.parametrize.register_parametrization(m[0], "bias", nn.Tanh()),
    "weight_norm": lambda m, o, d: nn.utils.parametrizations.weight_norm(m[0]),
}
_OPTIMIZERS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("sgd", torch.optim.SGD, {"momentum": 0.9}),
    ("adamw", torch.optim.AdamW, {"capturable": False}),
)


def _event(change: Callable[[Any, Any, str], object], optimizer: Any, settings: dict[str, Any]) -> Make:
    def make(device: str) -> Case:
        model, made, train = trained(device, optimizer, **settings)
        return Case(train, before=at(CHANGE, lambda: change(model, made, device)), state=values(model))

    return make


STEPS |= {
    f"{name}_{kind}": _event(change, optimizer, settings)
    for name, change in EVENTS.items()
    for kind, optimizer, settings in _OPTIMIZERS
}


def _global_hook(register: Callable[[Any], Any]) -> Make:
    def make(device: str) -> Case:
        model, _, train = trained(device)
        handles: list[Any] = []

        def around(k: int) -> Any:
            return _registered(register) if CHANGE <= k < 15 else contextlib.nullcontext()

        return Case(train, around=around, state=values(model), before=lambda k: handles.clear())

    return make


@contextlib.contextmanager
def _registered(register: Callable[[Any], Any]) -> Any:
    handle = register(None)
    try:
        yield
    finally:
        handle.remove()


_modules = nn.modules.module
STEPS |= {
    "global_forward_hook": _global_hook(lambda _: _modules.register_module_forward_hook(lambda m, i, o: o * 1.5)),
    "global_pre_hook": _global_hook(lambda _: _modules.register_module_forward_pre_hook(lambda m, i: (i[0] * 2,))),
    "global_backward_hook": _global_hook(
        lambda _: _modules.register_module_full_backward_hook(lambda m, i, o: tuple(g and g * 2 for g in i[:0]) or None)
    ),
    "global_optimizer_hook": _global_hook(
        lambda _: register_optimizer_step_pre_hook(
            lambda o, *_: [p.grad.mul_(2) for p in o.param_groups[0]["params"]].clear()  # type: ignore[func-returns-value]
        )
    ),
}
