"""What a step function depends on besides its arguments, and whether it is still the same.

Starting from the function, everything is looked at that its code can name: closure cells, globals, defaults, `self`,
and from there modules, optimizers, containers, and the attributes that the code reads. Each place that is found becomes
a check, carried out natively before each replay.

Plain values (numbers, strings, ...) are compared by value, all else by identity. Parameters, buffers and optimizer
state are compared down to their storage.
"""

from __future__ import annotations

import array
import dis
import functools
import hashlib
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._device import DeviceContext  # private; checked on torch 2.11 and 2.13

from tarry.native import C

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
MAX_ITEMS = 10_000
"""Of a longer container only the length is checked."""
MAX_DEPTH = 100

_PACKAGES = [str(Path(file).parent) for file in (torch.__file__, Path(__file__).parent)]
_PACKAGES += [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_FOREIGN = ("<frozen", *(f"{path}/" for path in _PACKAGES))
# Registries of hooks that run in every module and every optimizer; private, checked on torch 2.11 and 2.13.
_GLOBAL_HOOKS = (
    ("torch.nn.modules.module", ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")),
    ("torch.optim.optimizer", ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
)


# Methods that code calls without naming them.
_IMPLICIT = frozenset(
    f"__{name}__" for name in ("call", "getattr", "getattribute", "getitem", "len", "iter", "contains", "bool")
) | {"forward"}


def is_foreign(file: str) -> bool:
    """Whether code is the standard library's, torch's, tarry's or an installed package's: taken not to change."""
    return file.startswith(_FOREIGN)


def _is_foreign_module(module: types.ModuleType | None) -> bool:
    if module is None:
        return True
    file = getattr(module, "__file__", None)
    return is_foreign(file) if file else module.__name__ != "__main__"


@functools.lru_cache(maxsize=512)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals and the attributes that a piece of code reads, those of functions defined in it among them."""
    variables, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_variables, inner_attributes = _names_in(constant)
            variables |= inner_variables
            attributes |= inner_attributes
    return frozenset(variables), frozenset(attributes)


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
        attributes: set[str] = set()
        while True:  # an attribute's name may turn up in code that is reached through another attribute
            walk = _Walk(frozenset(attributes))
            walk.all(function, arguments)
            if walk.attributes <= attributes:
                break
            attributes |= walk.attributes
        self._walk = walk
        self.tensors: list[torch.Tensor] = list(walk.tensors.values())
        self.names: dict[int, str] = {id(t): walk.tensor_paths[k] for k, t in walk.tensors.items()}
        self._devices = default_devices()
        self._host_versions = [(t, t._version) for t in self.tensors if t.device.type != "tarry"]

    def __len__(self) -> int:
        return len(self._walk.guard)

    def failing(self, with_gradients: bool = True) -> int:
        """The number of the first check that fails, -1 if all hold, less if something is switched on or off."""
        if default_devices() != self._devices:
            return -2
        if self._host_versions and self.changed_host_tensor() is not None:
            return -3
        found: int = self._walk.guard.failing(with_gradients)
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
            return _explain_entries(path, expected, obj)
        now = _look(kind, obj, self._walk.keys[check])
        if isinstance(expected, PLAIN) and isinstance(now, PLAIN):
            return f"{path} was {expected!r} and is {now!r} now"
        return f"{path} is another object now"

    def changed_host_tensor(self) -> str | None:
        """The name of a host tensor that was written since."""
        for tensor, version in self._host_versions:
            if tensor._version != version:
                return self.names[id(tensor)]
        return None


_MISSING = object()


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


class _Walk:
    """One walk through what a function can name. It makes the checks, and keeps alive what they look at."""

    def __init__(self, attributes: frozenset[str]) -> None:
        self.guard = C.Guard()
        self.checks: list[tuple[str, str, Any]] = []  # path, kind, what is expected
        self.objects: list[Any] = []  # what each check looks into
        self.keys: list[Any] = []
        self.attributes: set[str] = set()  # that the code reads
        self.tensors: dict[int, torch.Tensor] = {}
        self.tensor_paths: dict[int, str] = {}
        self._known = attributes
        self._seen: dict[int, Any] = {}

    def all(self, function: Any, arguments: list[Any]) -> None:
        self.visit(function, getattr(function, "__name__", "the function"), 0)
        for k, argument in enumerate(arguments):
            if not isinstance(argument, torch.Tensor):
                self.visit(argument, f"argument {k}", 0)
        for module, names in _GLOBAL_HOOKS:
            for name in names:
                hooks = getattr(sys.modules[module], name, None)
                if hooks is not None:
                    self._hooks(hooks, name, 0)

    # ---- checks

    def _add(self, path: str, kind: str, expected: Any, obj: Any, key: Any = None) -> None:
        self.checks.append((path, kind, expected))
        self.objects.append(obj)
        self.keys.append(key)

    def _dict_item(self, container: dict[Any, Any], key: Any, path: str, depth: int) -> None:
        value = container[key]
        self._add(path, "item", value, container, key)
        self.guard.dict_item(container, key, value)
        self.visit(value, path, depth)

    def _attribute(self, obj: Any, name: str, path: str, depth: int) -> None:
        value = getattr(obj, name)
        self._add(path, "attribute", value, obj, name)
        self.guard.attribute(obj, name, value)
        self.visit(value, path, depth)

    def _length(self, sized: Any, path: str) -> None:
        self._add(path, "length", len(sized), sized)
        self.guard.length(sized)

    def _entries(self, container: dict[Any, Any], path: str) -> None:
        self._add(path, "entries", dict(container), container)
        self.guard.dict_entries(container)

    # ---- what there is to see

    def visit(self, value: Any, path: str, depth: int) -> None:
        """Look at an object, once, by what it is."""
        if isinstance(value, PLAIN) or id(value) in self._seen or depth > MAX_DEPTH:
            return
        self._seen[id(value)] = value
        for kind, look in _LOOKS:
            if isinstance(value, kind):
                look(self, value, path, depth + 1)
                return
        self._object(value, path, depth + 1)

    def _tensor(self, tensor: torch.Tensor, path: str, depth: int) -> None:
        self.tensors[id(tensor)] = tensor
        self.tensor_paths[id(tensor)] = path
        self._add(path, "tensor", None, tensor)
        self.guard.tensor(tensor)
        if tensor.is_leaf and tensor.requires_grad:
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                hooks = getattr(tensor, name, None)
                if hooks is not None:
                    self._hooks(hooks, f"{path}.{name}", depth)

    def _hooks(self, hooks: dict[Any, Any], path: str, depth: int) -> None:
        """What runs at certain moments: the very functions, and all that they depend on."""
        self._entries(hooks, path)
        for hook in hooks.values():
            self.visit(hook, path, depth)

    def _module(self, module: nn.Module, path: str, depth: int) -> None:
        content = module.__dict__
        for name, value in content.items():
            inner = f"{path}.{name}"
            if name in ("_parameters", "_buffers", "_modules"):
                self._entries(value, path)
                for key, item in value.items():
                    self.visit(item, f"{path}.{key}", depth)
            elif "_hooks" in name and isinstance(value, dict):
                self._hooks(value, inner, depth)
            else:
                self._dict_item(content, name, inner, depth)
        self._of_class(module, content, path, depth)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str, depth: int) -> None:
        content = optimizer.__dict__
        for name in ("param_groups", "state"):
            self._add(f"{path}.{name}", "item", content[name], content, name)
            self.guard.dict_item(content, name, content[name])
        self._list(optimizer.param_groups, f"{path}.param_groups", depth)
        self._entries(optimizer.state, f"{path}.state")
        for parameter, state in optimizer.state.items():
            name = self.tensor_paths.get(id(parameter), "a parameter")
            self.visit(state, f"{path}.state[{name}]", depth)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if name in content:
                self._hooks(content[name], f"{path}.{name}", depth)

    def _dict(self, container: dict[Any, Any], path: str, depth: int) -> None:
        if len(container) > MAX_ITEMS:
            self._length(container, path)
            return
        self._entries(container, path)
        for key, value in container.items():
            self.visit(value, f"{path}[{key!r}]" if isinstance(key, PLAIN) else f"{path}[...]", depth)

    def _list(self, container: list[Any], path: str, depth: int) -> None:
        self._length(container, path)
        for k, value in enumerate(container if len(container) <= MAX_ITEMS else ()):
            self._add(f"{path}[{k}]", "item", value, container, k)
            self.guard.list_item(container, k, value)
            self.visit(value, f"{path}[{k}]", depth)

    def _tuple(self, container: tuple[Any, ...], path: str, depth: int) -> None:
        for k, value in enumerate(container[:MAX_ITEMS]):
            self.visit(value, f"{path}[{k}]", depth)

    def _contents(self, container: Any, path: str, depth: int) -> None:
        """A container that is looked into as a whole: a set, a deque, an array."""
        sized = getattr(container, "ndim", 1) > 0  # an array may have one element and no length
        if sized:
            self._length(container, path)
        if not sized or len(container):
            contents = _Contents(container)
            self._seen[id(contents)] = contents  # kept alive
            self._attribute(contents, "text", f"the contents of {path}", depth)

    def _function(self, function: types.FunctionType, path: str, depth: int) -> None:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._cell(cell, name, depth)
        if is_foreign(code.co_filename):
            return
        variables, attributes = _names_in(code)
        self.attributes |= attributes
        for name in ("__code__", "__defaults__"):
            self._attribute(function, name, f"{path}.{name}", depth)
        if function.__kwdefaults__:
            self._dict(function.__kwdefaults__, f"{path}.__kwdefaults__", depth)
        for name in variables:
            if name in function.__globals__:
                self._dict_item(function.__globals__, name, name, depth)

    def _cell(self, cell: types.CellType, name: str, depth: int) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return
        self._add(name, "cell", value, cell)
        self.guard.cell(cell, value)
        self.visit(value, name, depth)

    def _method(self, method: types.MethodType, path: str, depth: int) -> None:
        self.visit(method.__self__, "self", depth)
        self.visit(method.__func__, path, depth)

    def _partial(self, partial: functools.partial[Any], path: str, depth: int) -> None:
        self.visit(partial.func, path, depth)
        self._tuple(partial.args, f"{path}.args", depth)
        self._dict(partial.keywords, f"{path}.keywords", depth)

    def _python_module(self, module: types.ModuleType, path: str, depth: int) -> None:
        if not _is_foreign_module(module):
            self._named(vars(module), path, depth)

    def _object(self, obj: Any, path: str, depth: int) -> None:
        content = getattr(obj, "__dict__", None)
        if type(content) is dict:
            self._named(content, path, depth)
            if "__wrapped__" in content:  # another step function, a cached function
                self.visit(content["__wrapped__"], path, depth)
        self._of_class(obj, content if type(content) is dict else {}, path, depth)

    def _class(self, cls: type, path: str, depth: int) -> None:
        self._of_class(cls, {}, path, depth)

    def _named(self, content: dict[str, Any], path: str, depth: int) -> None:
        """The entries of a namespace that the code reads as attributes."""
        for name in self._known & content.keys():
            self._dict_item(content, name, f"{path}.{name}", depth)

    def _of_class(self, obj: Any, content: dict[str, Any], path: str, depth: int) -> None:
        """What an object, or a class, has from classes that are the user's: code, and attributes that it reads."""
        classes = obj.__mro__ if isinstance(obj, type) else type(obj).__mro__
        for cls in classes:
            if _is_foreign_module(sys.modules.get(cls.__module__)):
                continue
            for name, value in vars(cls).items():
                inner = f"{path}.{name}"
                if name not in self._known and name not in _IMPLICIT:
                    continue
                if isinstance(value, staticmethod | classmethod):
                    value = value.__func__
                if isinstance(value, types.FunctionType):
                    self.visit(value, inner, depth)
                elif isinstance(value, property):
                    self.visit(value.fget, inner, depth)  # and what it reads
                elif name not in content and not name.startswith("__") and _is_steady(obj, name):
                    self._attribute(obj, name, inner, depth)


class _Contents:
    """What is in a container, as text."""

    def __init__(self, container: Any) -> None:
        self._container = container

    @property
    def text(self) -> str:
        container = self._container
        if hasattr(container, "tobytes"):  # an array
            what = (str(getattr(container, "dtype", "")), getattr(container, "shape", ()), container.tobytes())
            return hashlib.sha256(repr(what).encode()).hexdigest()
        if isinstance(container, Mapping):
            return repr([(key, container[key]) for key in container])
        items = map(repr, container)
        return str(sorted(items) if isinstance(container, Set) else list(items))


def _is_steady(obj: Any, name: str) -> bool:
    """Whether an attribute is there, and the same thing each time that it is asked for."""
    first, second = getattr(obj, name, _MISSING), getattr(obj, name, _MISSING)
    return first is not _MISSING and (first is second or (isinstance(first, PLAIN) and repr(first) == repr(second)))


def _nothing(walk: _Walk, value: Any, path: str, depth: int) -> None:
    """Built-in functions: taken not to change."""


_LOOKS: tuple[tuple[Any, Any], ...] = (
    (torch.Tensor, _Walk._tensor),
    (nn.Module, _Walk._module),
    (torch.optim.Optimizer, _Walk._optimizer),
    (type, _Walk._class),
    (dict, _Walk._dict),
    (list, _Walk._list),
    (tuple, _Walk._tuple),
    ((Set, Mapping, deque, bytearray, memoryview, array.array, numpy.ndarray), _Walk._contents),
    (types.MethodType, _Walk._method),
    (types.FunctionType, _Walk._function),
    (types.BuiltinFunctionType, _nothing),
    (types.CodeType, _nothing),
    (functools.partial, _Walk._partial),
    (types.ModuleType, _Walk._python_module),
)

