"""What a step function depends on besides its arguments, as far as it can be seen, and whether that is still the same.

The objects that the function's own code names - globals, closure cells, `self`, and what they directly hold - are
looked at: modules, optimizers and tensors whole, containers by their items, other objects by the attributes that code
names. What is found becomes a list of checks, carried out natively before each replay (`csrc/bind/guard.h`).

Guards say when to record early, and no more: what they cannot see, verification finds (`verification.py`).
"""

from __future__ import annotations

import dis
import functools
import io
import pickle
import queue
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Set
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._device import DeviceContext  # private; checked on torch 2.11 and 2.13

from tarry.replay.checks import PLAIN, Checks
from tarry.replay.counts import host_counts, is_torchs
from tarry.replay.reasons import NotReplayableError

MAX_BYTES = 1 << 16
MAX_ITEMS = 10_000
"""Of an array, and of a container: longer ones are not looked into."""
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")
MAX_HOPS = 3
"""From the function, over functions and objects, to the last ones that are looked into."""
_MISSING = object()
_RATES = frozenset({"lr", "param_groups", "get_last_lr"})

# Registries of hooks that run in every module and every optimizer; private, checked on torch 2.11 and 2.13.
_GLOBAL_HOOKS = (
    ("torch.nn.modules.module", ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")),
    ("torch.optim.optimizer", ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
)


def default_devices() -> tuple[str, ...] | None:
    """The devices that `torch.set_default_device` and `with torch.device(...)` have chosen; None under any other mode
    that sees functions called or operators run, and that wants to see them. Private names; checked on 2.11 and 2.13."""
    if torch._C._len_torch_function_stack() == 0 and torch._C._len_torch_dispatch_stack() == 0:
        return ()
    modes = torch.overrides._get_current_function_mode_stack()
    if torch._C._len_torch_dispatch_stack() or not all(isinstance(mode, DeviceContext) for mode in modes):
        return None
    return tuple(str(mode.device) for mode in modes)


class _Names(NamedTuple):
    """What a function's own code names, functions defined in it included."""

    variables: frozenset[str]  # global ones
    attributes: frozenset[str]  # strings that may be meant for getattr included
    chains: frozenset[tuple[str, ...]]  # a variable, an attribute of it, an attribute of that, ...


@functools.lru_cache(maxsize=512)
def _names_in(code: types.CodeType) -> _Names:
    attributes = {value for value in code.co_consts if isinstance(value, str) and value.isidentifier()}
    variables, chains, chain = set(), set(), tuple[str, ...]()
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(each.argval)
        elif each.opname.endswith(("_ATTR", "_METHOD", "IMPORT_FROM")):
            attributes.add(each.argval)
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = (*chain, each.argval)
            chains.add(chain)
        elif each.opname != "CACHE":
            chain = (each.argval,) if each.opname.startswith(_LOADS) else ()
    inner = [_names_in(value) for value in code.co_consts if isinstance(value, types.CodeType)]
    return _Names(
        *(frozenset(own).union(*more) for own, *more in zip((variables, attributes, chains), *inner, strict=True))
    )


class _Contents:
    """What is in an object that cannot be checked item by item. Objects in it count by identity."""

    def __init__(self, container: Any) -> None:
        self._container = container

    @property
    def all(self) -> Any:
        container = self._container
        if isinstance(container, ContextVar):
            container = (container.get(None),)
        elif not isinstance(container, deque | Set):
            with memoryview(container) as buffer:
                return buffer.tobytes() if buffer.nbytes <= MAX_BYTES else buffer.nbytes
        if len(container) > MAX_ITEMS:
            return len(container)
        return tuple(item if isinstance(item, PLAIN) else id(item) for item in container)


def _is_buffer(value: Any) -> bool:
    """Whether it is an array of numbers: numpy's, Python's, or C's."""
    try:
        with memoryview(value) as buffer:
            return "O" not in buffer.format
    except (TypeError, ValueError, BufferError):
        return False


@functools.lru_cache(maxsize=512)
def _slots_of(cls: type) -> frozenset[str]:
    slots = (vars(base).get("__slots__", ()) for base in cls.__mro__)
    return frozenset(name for found in slots for name in ((found,) if isinstance(found, str) else found))


class Guards(Checks):
    """The surroundings of a function at one moment."""

    def __init__(self, function: Any, arguments: list[Any]) -> None:
        super().__init__()
        self.names: dict[int, str] = {}  # of tensors, by id
        self.tensors: list[torch.Tensor] = []
        self._rates: list[dict[str, Any]] = []  # parameter groups of torch's own optimizers
        self._generators: list[tuple[str, Any]] = []  # of random numbers, by path
        self._optimizers: list[torch.optim.Optimizer] = []
        self._seen: dict[int, Any] = {}
        self._code: frozenset[str] = frozenset()
        self._looks_at_rates = False
        self._devices = default_devices()
        self._gather(function, 0)
        self._seen.clear()
        self._visit(function, getattr(function, "__name__", "the function"), 0)
        self._visit(_code_of(function), getattr(function, "__name__", "the function"), 0)
        for k, argument in enumerate(arguments):
            if not isinstance(argument, torch.Tensor):
                self._visit(argument, f"argument {k}", 1)
        for module, registries in _GLOBAL_HOOKS:
            for name in registries:
                if (hooks := getattr(sys.modules[module], name, None)) is not None:
                    self.entries(hooks, name)
        self.holders = [t for t in self.tensors if t.requires_grad and t.is_leaf]
        """Of gradients."""
        self._host_versions = [(t, t._version) for t in self.tensors if t.device.type != "tarry"]
        self.counts = {id(count): optimizer for optimizer in self._optimizers for count in host_counts(optimizer)}
        """Of steps, on the host, by id."""

    @property
    def rates(self) -> list[dict[str, Any]]:
        """Parameter groups whose learning rates can be followed: see tarry.replay.rates. If the function's own code
        looks at rates, they are values like any other."""
        return [] if self._looks_at_rates else self._rates

    # ---- the walk

    def _gather(self, function: Any, hops: int) -> None:
        """Collect the names that the function's code has, and that of the functions which it names."""
        owner, function = getattr(function, "__self__", function), _code_of(function)
        if _is_foreign(function) or id(function) in self._seen or hops > MAX_HOPS:
            return
        self._seen[id(function)] = function
        names = _names_in(function.__code__)
        self._code |= names.attributes
        self._looks_at_rates = self._looks_at_rates or not _RATES.isdisjoint(names.attributes)
        named = {name: function.__globals__[name] for name in names.variables if name in function.__globals__}
        named |= dict(zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True))
        named |= dict.fromkeys(function.__code__.co_varnames[:1], owner)
        for value in named.values():
            wraps = _own_attribute(value, "__wrapped__") is not None
            if wraps or isinstance(value, types.FunctionType | types.MethodType | functools.partial):
                self._gather(value, hops + 1)
        for variable, *attributes, name in names.chains:
            owner = functools.reduce(_own_attribute, attributes, named.get(variable))
            for method in (_own_attribute(owner, name), getattr(type(owner), name, None)):
                if isinstance(method, types.FunctionType):
                    self._gather(types.MethodType(method, owner), hops + 1)

    def _visit(self, value: Any, path: str, hops: int, *, under_module: bool = False) -> None:
        """Look at an object, once, by what it is."""
        if isinstance(value, PLAIN) or id(value) in self._seen or hops > MAX_HOPS:
            return
        self._seen[id(value)] = value
        match value:
            case torch.Tensor():
                self._tensor(value, path)
            case nn.Module():
                self._module(value, path, hops)
            case torch.optim.Optimizer() if {"param_groups", "state"} <= value.__dict__.keys():
                self._optimizer(value, path, hops)
            case dict() | list() | tuple():
                self._container(value, path, hops, under_module)
            case deque() | Set() if under_module:
                self.length(value, path)
            case deque() | Set() | ContextVar():
                self._contents(value, path)
            case functools.partial():
                self._visit(value.func, path, hops)
                self._visit((value.args, value.keywords), f"{path}.args", hops)
            case types.MethodType():
                self._visit(value.__self__, "self", hops, under_module=under_module)
                self._visit(value.__func__, path, hops)
            case types.FunctionType():
                self._function(value, path, hops)
            case random.Random() | numpy.random.Generator() | numpy.random.RandomState() | torch.Generator():
                self._generators.append((path, value))
            case type():
                self._class(value, path)
            case types.ModuleType():
                self._named(vars(value), path, hops, only=(*PLAIN, types.FunctionType))
            case _ if _is_stream(value) and not under_module:
                raise NotReplayableError(
                    f"it can take from {path}, a {type(value).__name__}, which a replay would not do. Take from it "
                    f"outside of the function, and pass what it gives as an argument"
                )
            case _ if _is_buffer(value):
                self._contents(value, path)
            case _:
                self._looks_at_rates = self._looks_at_rates or isinstance(value, LRScheduler)
                self._object(value, path, hops, under_module or is_torchs(value))

    def _contents(self, container: Any, path: str) -> None:
        contents = _Contents(container)
        self._seen[id(contents)] = contents  # kept alive
        self.attribute(contents, "all", f"the contents of {path}")

    def _tensor(self, tensor: torch.Tensor, path: str) -> None:
        self.tensors.append(tensor)
        self.names[id(tensor)] = path
        self.tensor(tensor, path)
        if tensor.is_leaf and tensor.requires_grad:
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if (hooks := getattr(tensor, name, None)) is not None:
                    self.entries(hooks, f"{path}.{name}")

    def _module(self, module: nn.Module, path: str, hops: int) -> None:
        content = module.__dict__
        self.entries(content, path)
        if id(type(module)) not in self._seen:
            self.attribute(type(module), "forward", f"{path}.forward")
        self._class(type(module), path)
        for name, value in content.items():
            inner = path if name in ("_parameters", "_buffers", "_modules") else f"{path}.{name}"
            if isinstance(value, dict):
                self.entries(value, inner)
                for key, item in () if "_hooks" in name else value.items():
                    self._visit(
                        item, f"{inner}.{key}", hops if isinstance(item, nn.Module) else hops + 1, under_module=True
                    )
            else:
                self._visit(value, inner, hops + 1, under_module=True)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str, hops: int) -> None:
        self._optimizers.append(optimizer)
        content = optimizer.__dict__
        for name in ("param_groups", "state"):
            self.dict_item(content, name, f"{path}.{name}")
        groups = optimizer.param_groups
        self.length(groups, f"{path}.param_groups")
        for k, group in enumerate(groups):
            inner = f"{path}.param_groups[{k}]"
            self.list_item(groups, k, inner)
            if self._is_followed(group, optimizer):
                self._seen[id(group)] = group
                self._rates.append(group)
                rate = next(key for key in group if key == "lr")
                self.rate(group, rate, f"{inner}['lr']")
                self._container(group, inner, hops, False, rate)
            else:
                self._visit(group, inner, hops)
        self.entries(optimizer.state, f"{path}.state")
        for parameter, state in optimizer.state.items():
            self._visit(state, f"{path}.state[{self.names.get(id(parameter), 'a parameter')}]", hops)
        for name, value in content.items():
            if name.endswith("_hooks") and isinstance(value, dict):
                self.entries(value, f"{path}.{name}")
            elif not name.startswith("_") and (isinstance(value, PLAIN) or name in self._code):
                self.dict_item(content, name, f"{path}.{name}")
        self.length(content, path)  # what is not there yet may hide what the class has

    def _is_followed(self, group: Any, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the learning rate of a group may be followed: see tarry.replay.rates."""
        return (
            type(group) is dict
            and is_torchs(optimizer)
            and type(group.get("lr")) is float
            and id(group) not in self._seen
        )

    def _container(self, container: Any, path: str, hops: int, under_module: bool, rate: str | None = None) -> None:
        if len(container) > MAX_ITEMS:
            self.length(container, path)
            return
        if isinstance(container, dict):
            self.entries(container, path, rate)
            items = [(repr(key) if isinstance(key, PLAIN) else "...", value) for key, value in container.items()]
        else:
            items = [(str(k), value) for k, value in enumerate(container)]
        if isinstance(container, list):
            self.length(container, path)
        for k, (name, value) in enumerate(items):
            if isinstance(container, list):
                self.list_item(container, k, f"{path}[{k}]")
            self._visit(value, f"{path}[{name}]", hops, under_module=under_module)

    def _function(self, function: types.FunctionType, path: str, hops: int) -> None:
        if _is_foreign(function):
            return
        for name in ("__code__", "__defaults__"):
            self._visit(self.attribute(function, name, f"{path}.{name}"), f"{path}.{name}", hops)
        if function.__kwdefaults__:
            self._visit(function.__kwdefaults__, f"{path}.__kwdefaults__", hops)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if (value := _content(cell)) is not _MISSING:
                self.cell(cell, value, name)
                self._visit(value, name, hops + 1)
        self._named(function.__dict__, path, hops)
        content = function.__globals__
        for name in sorted(_names_in(function.__code__).variables & content.keys()):
            self.dict_item(content, name, name)
            self._visit(content[name], name, hops + 1)

    def _object(self, obj: Any, path: str, hops: int, all_plain: bool) -> None:
        for name in sorted(_slots_of(type(obj)) & self._code):  # type: ignore[arg-type]
            if hasattr(obj, name):
                self._visit(self.attribute(obj, name, f"{path}.{name}"), f"{path}.{name}", hops + 1)
        content = getattr(obj, "__dict__", None)
        if type(content) is not dict:
            return
        if callable(wrapped := content.get("__wrapped__")):  # another compiled function, a cached one
            self._visit(wrapped, path, hops)
            return
        self._class(type(obj), path)
        if all_plain:  # code that is not looked at may read any of them
            for name, value in content.items():
                if isinstance(value, PLAIN):
                    self.dict_item(content, name, f"{path}.{name}")
        else:
            self.length(content, path)  # what is not there yet may hide what the class has
            self._named(content, path, hops)

    def _named(self, content: dict[str, Any], path: str, hops: int, only: tuple[type, ...] = (object,)) -> None:
        """The attributes of an object, of a function, or of a Python module, that code names."""
        for name in sorted(self._code & content.keys()):
            if isinstance(content[name], only):
                self.dict_item(content, name, f"{path}.{name}")
                self._visit(content[name], f"{path}.{name}", hops + 1)

    def _class(self, cls: type, path: str) -> None:
        """The plain values that a class has under names that code has."""
        for base in cls.__mro__:
            if id(base) not in self._seen or base is cls:
                self._seen[id(base)] = base
                for name, value in vars(base).items():
                    if name in self._code and isinstance(value, PLAIN) and not name.startswith("__"):
                        self.attribute(base, name, f"{path}.{name}")

    # ---- is it still the same?

    def failing(self, with_gradients: bool = True, with_counts: bool = True, with_rates: bool = True) -> int:
        """The number of the first check that fails, -1 if all hold, less if something is switched on or off. Without
        gradients, these may have come and gone; without counts, optimizers may have counted steps; without rates,
        learning rates that can be followed may be others."""
        if default_devices() != self._devices:
            return -2
        if self._host_versions and self.changed_host_tensor(with_counts) is not None:
            return -3
        found: int = self.guard.failing(with_gradients, with_rates or self._looks_at_rates)
        return found

    def is_value(self, check: int) -> bool:
        """Whether a check compares a plain value, or what is switched on: such a change may well be undone."""
        return check < 0 or self.compares_plain(check)

    def explain_failing(self, check: int) -> str:
        """What has changed, in one line."""
        if check == -3:
            return f"{self.changed_host_tensor()}, a tensor on the host, was changed"
        if check < 0:
            return "grad mode, autocast, a dispatch mode, the default dtype or another such setting has changed"
        return self.explain(check)

    def generator_states(self) -> list[tuple[str, Any]]:
        """Of generators of random numbers on the host: their names and what they are at."""
        return [(path, state_of(generator)) for path, generator in self._generators]

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


def _code_of(function: Any) -> Any:
    """The function whose code runs when something is called."""
    while not isinstance(function, types.FunctionType):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif (wrapped := getattr(function, "__wrapped__", None)) is not None:  # another compiled function, a cached one
            function = wrapped
        else:
            return getattr(type(function), "forward" if isinstance(function, nn.Module) else "__call__", None)
    return function


def _is_foreign(function: Any) -> bool:
    """Whether there is no Python code to look at, or it is PyTorch's."""
    return not isinstance(function, types.FunctionType) or (function.__module__ or "").partition(".")[0] == "torch"


def _own_attribute(obj: Any, name: str) -> Any:
    """An attribute that an object, or a module of PyTorch, has itself."""
    content = getattr(obj, "__dict__", None)
    if not isinstance(content, dict):
        return None
    return content[name] if name in content else content.get("_modules", {}).get(name)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _is_stream(value: Any) -> bool:
    """Whether each call gives something else, and nothing shows what is next."""
    if isinstance(value, io.IOBase):
        return not value.closed and value.readable()
    is_python = isinstance(getattr(type(value), "__next__", None), types.FunctionType)
    return isinstance(value, queue.Queue | queue.SimpleQueue) or (isinstance(value, Iterator) and not is_python)


def state_of(generator: Any) -> Any:
    """The state of a generator of random numbers, or of a module that has one."""
    match generator:
        case torch.Generator():
            return generator.get_state().cpu().numpy().tobytes()
        case numpy.random.Generator():
            return pickle.dumps(generator.bit_generator.state)
        case numpy.random.RandomState() | types.ModuleType(__name__="numpy.random"):
            state: Any = generator.get_state()
            name, keys, *rest = state
            return name, keys.tobytes(), rest
    return generator.getstate()
