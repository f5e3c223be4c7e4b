"""What takes the place of functions and classes of torch in lazy mode. `table.py` says which of which."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tarry.errors import TarryError
from tarry.lazy.devices import Devices, is_left_alone
from tarry.native import C

Function = Callable[..., Any]
_NAMES = (str, torch.device)
_NUMBERS = (list, tuple, int, float)  # what a tensor is made of, other than an array


def factory(original: Function, devices: Devices) -> Function:
    """A function that makes a tensor and takes `device=`."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and not is_left_alone(devices):
            kwargs["device"] = devices.replace(device)
        return original(*args, **kwargs)

    return make


def default_factory(original: Function, devices: Devices) -> Function:
    """As `factory`, for the device that is meant when none is named."""
    shares = original.__name__ in ("as_tensor", "asarray")
    drawn_on_host = (
        original.__name__ in ("rand", "randn", "randint", "randperm") and torch.device(C.real_device(0)).type != "cpu"
    )

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if drawn_on_host and kwargs.get("generator") is not None and not is_left_alone(devices):
            # Its generator is the host's, as the program would have it without tarry, and so are its numbers.
            requires_grad = kwargs.pop("requires_grad", False)
            drawn = original(*args, **kwargs | ({"device": "cpu"} if kwargs.get("out") is None else {}))
            return drawn.to(devices.target).requires_grad_(requires_grad)
        if device is not None:
            if not is_left_alone(devices):
                kwargs["device"] = devices.replace(device)
        elif not (
            is_left_alone(devices) or kwargs.get("out") is not None or kwargs.get("pin_memory") or _is_elsewhere()
        ) and (
            # What shares memory with an array goes on doing so; operators take a copy of it.
            not shares or (args and isinstance(args[0], _NUMBERS))
        ):
            kwargs["device"] = devices.target
        return original(*args, **kwargs)

    return make


def _is_elsewhere() -> bool:
    """Whether another default is in force (`with torch.device("meta")`), or this process is a worker of a loader."""
    if torch._C._len_torch_function_stack() and torch.get_default_device().type != "cpu":
        return True
    return torch.get_device_module("tarry")._is_in_bad_fork() or torch.utils.data.get_worker_info() is not None


def device_argument(original: Function, devices: Devices) -> Function:
    """A function or an `__init__` that takes a device or the name of one as its first argument, or by keyword."""
    names = ("device", "device_type")
    at = 1 if original.__name__ == "__init__" else 0

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_left_alone(devices):
            if len(args) > at:
                args = (*args[:at], devices.replace(args[at]), *args[at + 1 :])
            for name in names:
                if name in kwargs:
                    kwargs[name] = devices.replace(kwargs[name])
        return original(*args, **kwargs)

    return call


def autocast_state(original: Function, devices: Devices) -> Function:
    """`torch.is_autocast_enabled()`: without a name, it asks for CUDA's."""

    @functools.wraps(original)
    def is_enabled(*args: Any) -> Any:
        if args or devices.source != "cuda":
            return original(*args) if is_left_alone(devices) else original(*map(devices.replace, args))
        return original() if is_left_alone(devices) else original(devices.target)

    return is_enabled


def autocast_init(original: Function, devices: Devices) -> Function:
    """`torch.autocast(device_type, dtype=None, ...)`: without a dtype, the one that the named device has."""
    default = {"cuda": torch.float16, "cpu": torch.bfloat16}[devices.source]

    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == devices.source and not is_left_alone(devices):
            device_type, dtype = devices.target, dtype or default
        original(self, device_type, dtype, *args, **kwargs)

    return init


def scaler_init(original: Function, devices: Devices) -> Function:
    """`torch.amp.GradScaler(device="cuda", ...)`: the default is a device, too."""

    @functools.wraps(original)
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, device if is_left_alone(devices) else devices.replace(device), *args, **kwargs)

    return init


def custom_function(original: Function, devices: Devices) -> Function:
    """`torch.amp.custom_fwd(..., device_type="cuda")`, which compares the name with those of tensors."""

    @functools.wraps(original)
    def decorate(*args: Any, device_type: str, **kwargs: Any) -> Any:
        return original(*args, device_type=devices.replace(device_type), **kwargs)

    return decorate


def default_tensor_type(original: Function, devices: Devices) -> Function:
    """`torch.set_default_tensor_type("torch.cuda.FloatTensor")`, and with a class of that name."""

    @functools.wraps(original)
    def set_default(kind: Any) -> None:
        name = getattr(kind, "legacy_name", kind)
        if isinstance(name, str) and name.startswith("torch.cuda."):
            torch.set_default_dtype(getattr(torch, name.removeprefix("torch.cuda.")).dtype)
            torch.set_default_device(devices.target)
        else:
            original(kind)

    return set_default


def moving_method(original: Function, devices: Devices) -> Function:
    """`tensor.to(...)`: a device may stand first, or be given by keyword."""

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], _NAMES):
            if not is_left_alone(devices):
                args = (devices.replace(args[0]), *args[1:])
        elif "device" in kwargs and not is_left_alone(devices):
            kwargs["device"] = devices.replace(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def cuda_method(original: Function, devices: Devices) -> Function:
    """`tensor.cuda(device=None, non_blocking=False)`, and a storage's."""

    @functools.wraps(original)
    def cuda(self: Any, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if is_left_alone(devices):
            return original(self, device, non_blocking, **kwargs)
        index = device if isinstance(device, int) else torch.device("cuda" if device is None else device).index
        target = devices.replace(torch.device("cuda", index))
        return self.to(device=target, non_blocking=non_blocking, **kwargs)

    return cuda


def cuda_property(original: Any, devices: Devices) -> property:
    """`tensor.is_cuda`: whether it is where the program put it by that name."""
    return property(lambda self: self.device.type == devices.target or original.__get__(self))


def type_method(original: Function, devices: Devices) -> Function:
    """`tensor.type("torch.cuda.FloatTensor")`, and with a class of that name."""

    @functools.wraps(original)
    def change(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = getattr(dtype, "legacy_name", dtype)
        if isinstance(name, str) and name.startswith("torch.cuda."):
            plain = getattr(torch, name.removeprefix("torch.cuda."))
            return self.to(devices.target, plain.dtype)
        return original(self, dtype, *args, **kwargs)

    return change


def legacy_class(name: str) -> Callable[[Any, Devices], type]:
    """`torch.cuda.FloatTensor` and the like: calls make tensors, and `isinstance` asks for dtype and device."""
    plain = getattr(torch, name)

    def make(original: Any, devices: Devices) -> type:
        class Legacy(type):
            legacy_name = f"torch.cuda.{name}"

            def __instancecheck__(cls, instance: Any) -> bool:
                is_here = isinstance(instance, torch.Tensor) and instance.device.type == devices.target
                return is_here and instance.dtype == plain.dtype

            def __call__(cls, *args: Any) -> torch.Tensor:
                return plain(*args).to(devices.target)

        return Legacy(name, (), {"__module__": "torch.cuda", "dtype": plain.dtype})

    return make


def stand_in(original: Any, devices: Devices, make: Function, kinds: tuple[type, ...] = ()) -> type:
    """A class in the place of another: a call of the program's makes something else, which is an instance of it."""

    class StandIn(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, *kinds))

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if is_left_alone(devices) else make(*args, **kwargs)

    return StandIn(original.__name__, (), {"__module__": original.__module__, "__doc__": original.__doc__})


def generator_class(original: Any, devices: Devices) -> type:
    """`torch.Generator(device)`. Where random numbers are drawn on the host, so are those of a generator; and those of
    a program for the CPU, whose loaders and samplers want it there."""
    on_host = torch.device(C.real_device(0)).type == "cpu" or devices.is_default

    def make(device: Any = "cpu") -> Any:
        chosen = torch.device(devices.replace(device))
        return original(device="cpu" if on_host and chosen.type == "tarry" else chosen)

    return stand_in(original, devices, make)


def host_dropout(original: Function, devices: Devices) -> Function:
    """`F.dropout`, with the numbers that it has on a CPU: the mask is rounded to the input's dtype there. The recorded
    operator, `native_dropout`, computes as CUDA does."""
    if devices.target != "tarry" or torch.device(C.real_device(0)).type != "cpu":
        return original

    @functools.wraps(original)
    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
        if not training or inplace or not 0 < p < 1 or type(input) is not torch.Tensor or input.device.type != "tarry":
            return original(input, p, training, inplace)
        return input * torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)

    return dropout


def unchanged(original: Function, devices: Devices) -> Function:
    """`torch.compile(f, ...)`: tarry compiles the steps, so there is nothing left for it to do. A module is wrapped as
    ever, since programs ask for `_orig_mod`, and its name is in the keys of checkpoints."""

    @functools.wraps(original)
    def compile_(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if is_left_alone(devices):
            return original(model, *args, **kwargs)
        return _uncompiled if model is None else _uncompiled(model)

    return compile_


def _uncompiled(function: Any) -> Any:
    if not isinstance(function, torch.nn.Module):
        return function
    from torch._dynamo.eval_frame import OptimizedModule  # private; seen in torch 2.11 to 2.13

    return OptimizedModule(function, _uncompiled)  # type: ignore[arg-type]


def module_compile(original: Function, devices: Devices) -> Function:
    """`module.compile()`: likewise."""
    return lambda self, *args, **kwargs: None


def single_device(original: Function, devices: Devices) -> Function:
    """`DataParallel.forward`: there is one device, so the module runs as it is."""

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    return forward


def refused(name: str, remedy: str) -> Callable[[Any, Devices], Any]:
    """Something that cannot be mapped: a call of it raises, with the remedy."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise TarryError(f"{name} cannot run on tarry: {remedy}")

    return lambda original, devices: _replaced(original, devices, refuse)


def _replaced(original: Any, devices: Devices, make: Function, kinds: tuple[type, ...] = ()) -> Any:
    """A function or class in the place of another."""
    if inspect.isclass(original):
        return stand_in(original, devices, make, kinds)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if is_left_alone(devices) else make(*args, **kwargs)

    return call


def refused_nccl(original: Function, devices: Devices) -> Function:
    """`torch.distributed.init_process_group(backend)`: NCCL takes CUDA's memory."""

    @functools.wraps(original)
    def init(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if backend is not None and "nccl" in str(backend):
            raise TarryError('torch.distributed with "nccl" cannot run on tarry: run one process, without torchrun')
        return original(backend, *args, **kwargs)

    return init


def device_function(name: str) -> Callable[[Any, Devices], Any]:
    """A function or class of torch.cuda: the one of torch.tarry that has its name."""
    to_tarry = Devices("cuda").replace

    def replacement(original: Any, devices: Devices) -> Any:
        ours = getattr(torch.get_device_module("tarry"), name)

        def make(*args: Any, **kwargs: Any) -> Any:
            return ours(*map(to_tarry, args), **{key: to_tarry(value) for key, value in kwargs.items()})

        kind = ours if inspect.isclass(ours) else getattr(torch, name, None)
        return _replaced(original, devices, make, (kind,) if inspect.isclass(kind) else ())

    return replacement


def constant(value: Any) -> Callable[[Any, Devices], Any]:
    """A function of torch.cuda with one possible answer."""
    return lambda original, devices: _replaced(original, devices, lambda *args, **kwargs: value)


nothing = constant(None)
"""A function that has no meaning here, and whose result is unused (`torch.cuda.nvtx.range_push`)."""
