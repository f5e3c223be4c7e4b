"""The walk through all that a function can name, which makes the checks of `tarry.replay.environment`."""

from __future__ import annotations

import array
import builtins
import contextvars
import functools
import io
import multiprocessing.queues
import operator
import os
import queue
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, Mapping, Set, ValuesView
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tarry.replay.checks import Checks
from tarry.replay.classes import MAKING, attributes_of, is_steady, methods_of
from tarry.replay.code import NO_NAMES, Chain, Names, Ownership, names_in, package_of
from tarry.replay.contents import GENERATORS, MAX_BYTES, PLAIN, Contents, state_reader
from tarry.replay.rates import looks_at_rates
from tarry.replay.reasons import NotReplayableError

MAX_ITEMS = 10_000
"""Of a container: more of them would take longer to look at than a step takes."""
MAX_DEPTH = 100
_UNKNOWN = object()
_ENVIRONMENT = frozenset({"environ", "getenv"})

# Registries of hooks that run in every module and every optimizer; private, checked on torch 2.11 and 2.13.
_GLOBAL_HOOKS = (
    ("torch.nn.modules.module", ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")),
    ("torch.optim.optimizer", ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
)


class Walk(Checks):
    """One walk. It makes the checks, and keeps alive what they look at."""

    def __init__(self, function: Any, known: Names = NO_NAMES) -> None:
        super().__init__()
        self.tensors: dict[int, torch.Tensor] = {}
        self.tensor_paths: dict[int, str] = {}
        self.generators: list[tuple[str, Callable[[], str], str]] = []  # of random numbers: path, state now and then
        self.optimizers: list[torch.optim.Optimizer] = []
        self.rates: list[dict[str, Any]] = []  # parameter groups of torch's own optimizers
        self.looks_at_rates = False
        self._function = function
        self._ownership = Ownership(function)
        self._known = known  # attributes that the code reads
        self._attributes: set[str] = set()  # ... and those that this walk has found
        self._strings: set[str] = set()  # that might be names of attributes
        self._by_string = self._any_attribute = False
        self._seen: dict[int, Any] = {}
        self._classes: set[tuple[type, bool]] = set()
        self._instances: dict[type, list[Any]] = {}  # of the user's classes
        self._owners: dict[types.FunctionType, list[type]] = {}  # classes that have a function as a method
        self._in_foreign = 0  # objects of installed packages that led here

    def all(self, arguments: list[Any]) -> None:
        function = self._function
        self.visit(function, getattr(function, "__name__", "the function"), 0)
        for k, argument in enumerate(arguments):
            if not isinstance(argument, torch.Tensor):
                self.visit(argument, f"argument {k}", 0)
        for module, names in _GLOBAL_HOOKS:
            for name in names:
                hooks = getattr(sys.modules[module], name, None)
                if hooks is not None:
                    self._hooks(hooks, name, 0)
        if not self._known.attributes.isdisjoint(_ENVIRONMENT):
            self.visit(os.environ, "os.environ", 0)

    def is_complete(self) -> bool:
        """Whether it has looked at all attributes that the code which it found can read."""
        return self._found() == self._known

    def again(self) -> Walk:
        return Walk(self._function, self._found())

    def _found(self) -> Names:
        attributes = self._known.attributes | self._attributes | self._read_from_first_arguments()
        if self._by_string:
            attributes |= self._strings
        return Names(
            attributes=attributes,
            by_string=self._known.by_string or self._by_string,
            any_attribute=self._known.any_attribute or self._any_attribute,
        )

    def _read_from_first_arguments(self) -> set[str]:
        """What methods read from `self`, and from what that has, now that all objects are known which it can be."""
        found: set[str] = set()
        for function, classes in self._owners.items():
            chains = [chain.names for chain in names_in(function.__code__).chains if chain.root == "first argument"]
            if not chains:
                continue
            owners = tuple(classes)
            objects = [obj for top, known in self._instances.items() if issubclass(top, owners) for obj in known]
            if not objects or any(is_named and issubclass(top, owners) for top, is_named in self._classes):
                objects.append(_UNKNOWN)  # the code may make more of them
            for names in chains:
                for obj in objects:
                    found |= self._read_from(obj, names)
        return found

    def _read_from(self, obj: Any, names: tuple[str, ...]) -> set[str]:
        """Which of these attributes, each of the one before, objects of the user's may have: not those that are read
        from a module of another package, or from an optimizer of torch's."""
        for k, name in enumerate(names):
            if self._is_closed(obj, name):
                return {*names[:k], *_ENVIRONMENT.intersection(names)}
            places = [vars(obj)] if isinstance(getattr(obj, "__dict__", None), dict) else []
            if isinstance(obj, nn.Module):
                places += [obj._modules, obj._parameters, obj._buffers]
            obj = next((place[name] for place in places if name in place), _UNKNOWN)
            if obj is _UNKNOWN:
                break
        return set(names)

    def _is_closed(self, obj: Any, name: str) -> bool:
        """Whether reading this attribute leads to nothing of the user's but what is looked at anyway."""
        if isinstance(obj, types.ModuleType):
            return self._ownership.is_foreign_module(obj.__name__)
        if not isinstance(obj, torch.optim.Optimizer) or package_of(type(obj)) != "torch":
            return False
        own = vars(obj).get(name, _UNKNOWN)  # the user's, or of a scheduler, which notes the steps that are taken
        code = getattr(own, "__code__", None)  # also of a method
        return own is _UNKNOWN or (code is not None and self._ownership.is_foreign(code.co_filename))

    # ---- places, and what is found there

    def _dict_item(self, container: dict[Any, Any], key: Any, path: str, depth: int) -> None:
        self.dict_item(container, key, path)
        self.visit(container[key], path, depth)

    def _attribute(self, obj: Any, name: str, path: str, depth: int) -> None:
        self.visit(self.attribute(obj, name, path), path, depth)

    # ---- what there is to see

    def visit(self, value: Any, path: str, depth: int) -> None:
        """Look at an object, once, by what it is."""
        if isinstance(value, str):
            self._strings.add(value)
        elif isinstance(value, LRScheduler):
            self.looks_at_rates = True
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
        self.tensor(tensor, path)
        if self._known.by_string or tensor.__dict__:
            self._dictionary(tensor.__dict__, path, depth)
        if tensor.is_leaf and tensor.requires_grad:
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                hooks = getattr(tensor, name, None)
                if hooks is not None:
                    self._hooks(hooks, f"{path}.{name}", depth)

    def _hooks(self, hooks: dict[Any, Any], path: str, depth: int) -> None:
        """What runs at certain moments: the very functions, and all that they depend on."""
        self.entries(hooks, path)
        for hook in hooks.values():
            self.visit(hook, path, depth)

    def _module(self, module: nn.Module, path: str, depth: int) -> None:
        content = module.__dict__
        self.length(content, path)  # what is not there yet may hide what the class has: a `forward`
        for name, value in content.items():
            inner = f"{path}.{name}"
            if name in ("_parameters", "_buffers", "_modules"):
                self.entries(value, path)
                for key, item in value.items():
                    self.visit(item, f"{path}.{key}", depth)
            elif "_hooks" in name and isinstance(value, dict):
                self._hooks(value, inner, depth)
            else:
                self._dict_item(content, name, inner, depth)
        self._of_class(module, content, path, depth)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str, depth: int) -> None:
        content = optimizer.__dict__
        if "param_groups" not in content or "state" not in content:  # it stands before another one
            self._object(optimizer, path, depth)
            return
        self.optimizers.append(optimizer)
        for name in ("param_groups", "state"):
            self.dict_item(content, name, f"{path}.{name}")
        if package_of(type(optimizer)) == "torch":
            self._rates(optimizer.param_groups, f"{path}.param_groups", depth)
        self._list(optimizer.param_groups, f"{path}.param_groups", depth)
        self.entries(optimizer.state, f"{path}.state")
        for parameter, state in optimizer.state.items():
            name = self.tensor_paths.get(id(parameter), "a parameter")
            self.visit(state, f"{path}.state[{name}]", depth)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if name in content:
                self._hooks(content[name], f"{path}.{name}", depth)
        self._named(content, path, depth, every=False)
        if package_of(type(optimizer)) != "torch":
            self._of_class(optimizer, content, path, depth)

    def _rates(self, groups: list[Any], path: str, depth: int) -> None:
        """Parameter groups whose learning rates may be followed: see tarry.replay.rates."""
        for k, group in enumerate(groups):
            inner = f"{path}[{k}]"
            rate = next((key for key in group if key == "lr"), None) if type(group) is dict else None
            if rate is None or type(group[rate]) is not float or id(group) in self._seen:
                continue
            self._seen[id(group)] = group
            self.rates.append(group)
            self.rate(group, rate, f"{inner}['lr']")
            self._dict(group, inner, depth, rate)

    def _dict(self, container: dict[Any, Any], path: str, depth: int, rate: str | None = None) -> None:
        if self._is_too_long(container, path):
            return
        self.entries(container, path, rate)
        for key, value in container.items():
            self.visit(value, f"{path}[{key!r}]" if isinstance(key, PLAIN) else f"{path}[...]", depth)

    def _list(self, container: list[Any], path: str, depth: int) -> None:
        if self._is_too_long(container, path):
            return
        self.length(container, path)
        for k, value in enumerate(container):
            self.list_item(container, k, f"{path}[{k}]")
            self.visit(value, f"{path}[{k}]", depth)

    def _tuple(self, container: tuple[Any, ...], path: str, depth: int) -> None:
        if self._is_too_long(container, path):
            return
        for k, value in enumerate(container):
            self.visit(value, f"{path}[{k}]", depth)

    def _contents(self, container: Any, path: str, depth: int) -> None:
        """A container that is looked into as a whole: a set, a deque, an array."""
        has_length = getattr(container, "ndim", 1) > 0 and hasattr(container, "__len__")
        if has_length and self._is_too_long(container, path):
            return
        if has_length:
            self.length(container, path)
            if not len(container):
                return
        contents = Contents(container)
        self._seen[id(contents)] = contents  # kept alive
        self._attribute(contents, "text", f"the contents of {path}", depth)
        for item in contents.objects():
            self.visit(item, f"{path}[...]", depth)

    def _is_too_long(self, container: Any, path: str) -> bool:
        """Whether only the length of a container is looked at. None that the code itself can name is such a one."""
        if hasattr(container, "tobytes"):
            size, limit, unit = getattr(container, "nbytes", len(container)), MAX_BYTES, "bytes"
        else:
            size, limit, unit = len(container), MAX_ITEMS, "entries"
        if size <= limit:
            return False
        if not self._in_foreign:
            raise NotReplayableError(
                f"it can read {path}, which has {size} {unit}: too many to look at before each replay. Pass what it "
                f"needs of them as an argument, or have them as a tensor on device 'tarry'"
            )
        self.length(container, path)
        return True

    def _generator(self, generator: Any, path: str, depth: int) -> None:
        read = state_reader(generator)
        self.generators.append((path, read, read()))

    def _stream(self, stream: Any, path: str, depth: int) -> None:
        """What gives something else each time that it is asked, and does not tell what is next."""
        is_python = isinstance(getattr(type(stream), "__next__", None), types.FunctionType)
        if is_python and not self._ownership.is_foreign_class(type(stream)):
            self._object(stream, path, depth)  # its code is looked at, and what that changes
        elif not self._in_foreign and not (isinstance(stream, io.IOBase) and not _can_be_read(stream)):
            raise NotReplayableError(
                f"it can take from {path}, a {type(stream).__name__}, which a replay would not do. Take from it "
                f"outside of the function, and pass what it gives as an argument"
            )

    def _code_of(self, function: types.FunctionType, path: str, depth: int) -> None:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._cell(cell, name, depth)
        if self._ownership.is_foreign(code.co_filename):
            return
        names = names_in(code)
        self.looks_at_rates = self.looks_at_rates or names.any_attribute or looks_at_rates(code)
        self._attributes |= names.attributes
        self._follow(names.chains, function)
        if function.__name__ not in MAKING:  # which only sets up what is new
            self._attributes |= names.written
        self._by_string = self._by_string or names.by_string
        self._any_attribute = self._any_attribute or names.any_attribute
        for name in ("__code__", "__defaults__"):
            self._attribute(function, name, f"{path}.{name}", depth)
        if function.__kwdefaults__:
            self._dict(function.__kwdefaults__, f"{path}.__kwdefaults__", depth)
        if function.__dict__:
            self._dictionary(function.__dict__, path, depth)
        self._globals(names.variables, function.__globals__, depth)
        for name in names.modules:
            self._imported(name, function.__globals__.get("__package__") or "", depth)

    def _follow(self, chains: frozenset[Chain], function: types.FunctionType) -> None:
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for chain in chains:
            if chain.root == "global":
                root = function.__globals__.get(chain.variable, _UNKNOWN)
            elif chain.root == "closure":
                root = _content(closure[chain.variable])
            elif function in self._owners:
                continue
            else:
                root = _UNKNOWN
            self._attributes |= self._read_from(root, chain.names)

    def _globals(self, names: frozenset[str], content: dict[str, Any], depth: int) -> None:
        for name in names:
            if name in content:
                self._dict_item(content, name, name, depth)
            elif not hasattr(builtins, name):
                self.length(content, f"the namespace without {name}")  # which may be defined yet
            elif name in ("eval", "exec"):
                raise NotReplayableError(f"it calls {name}(), and nobody knows what that depends on")

    def _imported(self, name: str, package: str, depth: int) -> None:
        for path in (name, f"{package}.{name}".strip(".")):
            module = sys.modules.get(path)
            if module is not None:
                self.visit(module, path, depth)

    def _cell(self, cell: types.CellType, name: str, depth: int) -> None:
        value = _content(cell)
        if value is not _UNKNOWN:
            self.cell(cell, value, name)
            self.visit(value, name, depth)

    def _method(self, method: types.MethodType, path: str, depth: int) -> None:
        self.visit(method.__self__, "self", depth)
        if isinstance(method.__func__, types.FunctionType):
            self._owners.setdefault(method.__func__, []).append(type(method.__self__))
        self.visit(method.__func__, path, depth)

    def _property(self, value: property, path: str, depth: int) -> None:
        self.visit(value.fget, path, depth)

    def _reference(self, reference: weakref.ref[Any], path: str, depth: int) -> None:
        self.visit(reference(), path, depth)

    def _partial(self, partial: functools.partial[Any], path: str, depth: int) -> None:
        self.visit(partial.func, path, depth)
        self._tuple(partial.args, f"{path}.args", depth)
        self._dict(partial.keywords, f"{path}.keywords", depth)

    def _getter(self, getter: Any, path: str, depth: int) -> None:
        """It has names of attributes, and tells them to who would copy it."""
        for name in getter.__reduce__()[1]:
            if isinstance(name, str):
                self._attributes |= set(name.split("."))

    def _python_module(self, module: types.ModuleType, path: str, depth: int) -> None:
        if not self._ownership.is_foreign_module(module.__name__):
            self._named(vars(module), path, depth, every=False)

    def _local(self, local: threading.local, path: str, depth: int) -> None:
        """Another thread sees other values, under the same names."""
        for name in self._known.attributes & vars(local).keys():
            self._attribute(local, name, f"{path}.{name}", depth)

    def _object(self, obj: Any, path: str, depth: int) -> None:
        found = getattr(obj, "__dict__", None)
        content: dict[str, Any] = found if type(found) is dict else {}
        if self._is_opaque(type(obj)):
            self._in_foreign += 1
            self.length(content, path)
            self._named(content, path, depth, every=True)
            self._in_foreign -= 1
            return
        if content is found:
            self._dictionary(content, path, depth)
        if "__wrapped__" in content:  # another step function, a cached function
            self.visit(content["__wrapped__"], path, depth)
        self._of_class(obj, content, path, depth)

    def _is_opaque(self, cls: type) -> bool:
        """Whether an object belongs to an installed package, whose code may read any of its attributes. Objects of the
        standard library and of tarry are read by the attributes that the user's code names."""
        if not all(self._ownership.is_foreign_class(base) for base in cls.__mro__):
            return False
        package = package_of(cls)
        return package != "tarry" and package not in sys.stdlib_module_names

    def _class(self, cls: type, path: str, depth: int) -> None:
        self._of_class(cls, {}, path, depth)

    def _named(self, content: dict[str, Any], path: str, depth: int, every: bool) -> None:
        """The entries of a namespace that the code reads as attributes; all of them if `every` one may be."""
        for name in list(content) if every else self._known.attributes & content.keys():
            self._dict_item(content, name, f"{path}.{name}", depth)

    def _dictionary(self, content: dict[str, Any], path: str, depth: int) -> None:
        """An object's own attributes. One that is not there yet may be looked for, or hide what the class has."""
        self.length(content, path)
        self._named(content, path, depth, every=self._known.any_attribute)

    def _of_class(self, obj: Any, content: dict[str, Any], path: str, depth: int) -> None:
        """What an object, or a class, has from classes that are the user's: code, and attributes that it reads."""
        is_class = isinstance(obj, type)
        top = obj if is_class else type(obj)
        if self._ownership.is_foreign_class(top):
            return
        if not is_class:
            self.attribute(obj, "__class__", f"the class of {path}")
            self._instances.setdefault(top, []).append(obj)
        classes = [cls for cls in top.__mro__ if not self._ownership.is_foreign_class(cls)]
        self._methods(top, classes, is_class, path, depth)
        for name, value in attributes_of(classes, self._known.attributes):
            if name in content:
                continue
            if is_steady(obj, name):
                self._attribute(obj, name, f"{path}.{name}", depth)
            else:
                self.visit(value, f"{path}.{name}", depth)  # it computes an attribute

    def _methods(self, top: type, classes: list[type], is_named: bool, path: str, depth: int) -> None:
        """The functions of a class: what they do, and that they are still the same. Once for each class."""
        if (top, is_named) in self._classes:
            return
        self._classes.add((top, is_named))
        for cls, name, value in methods_of(classes, self._known.attributes, is_named):
            if isinstance(vars(cls)[name], types.FunctionType):
                self._owners.setdefault(value, []).append(cls)
            for owner in {top, cls}:
                if is_steady(owner, name):
                    self._attribute(owner, name, f"{path}.{name}", depth)
            self.visit(value, f"{path}.{name}", depth)
        if issubclass(top, nn.Module):
            self._attribute(top, "forward", f"{path}.forward", depth)  # perhaps inherited, and replaced later


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _UNKNOWN


def _can_be_read(file: io.IOBase) -> bool:
    return not file.closed and file.readable()


def _nothing(walk: Walk, value: Any, path: str, depth: int) -> None:
    """Built-in functions: taken not to change."""


_CONTAINERS = (
    Set, Mapping, ValuesView, ItemsView, deque, bytearray, memoryview, array.array, numpy.ndarray,
    contextvars.ContextVar,
)  # fmt: skip
_QUEUES = (queue.Queue, queue.SimpleQueue, multiprocessing.queues.Queue)

_LOOKS: tuple[tuple[Any, Any], ...] = (
    (torch.Tensor, Walk._tensor),
    (nn.Module, Walk._module),
    (torch.optim.Optimizer, Walk._optimizer),
    (type, Walk._class),
    (dict, Walk._dict),
    (list, Walk._list),
    (tuple, Walk._tuple),
    (_CONTAINERS, Walk._contents),
    (types.MethodType, Walk._method),
    (types.FunctionType, Walk._code_of),
    ((types.BuiltinFunctionType, types.CodeType), _nothing),
    (functools.partial, Walk._partial),
    ((operator.attrgetter, operator.methodcaller), Walk._getter),
    (types.ModuleType, Walk._python_module),
    (property, Walk._property),
    (weakref.ref, Walk._reference),
    (threading.local, Walk._local),
    (GENERATORS, Walk._generator),
    ((Iterator, *_QUEUES), Walk._stream),
)
