"""What objects have from their classes: methods that may be called, and attributes."""

from __future__ import annotations

import types
from collections.abc import Iterator, Set
from typing import Any

from tarry.replay.contents import PLAIN

_METHODS = (types.FunctionType, property, staticmethod, classmethod)
# Methods that are called without being named: by torch, and (all others with two underscores) by Python.
_IMPLICIT = frozenset({"forward", "backward", "setup_context", "jvp", "vmap"})
# ... but these only where a class is named itself,
MAKING = frozenset({"__init__", "__new__", "__post_init__"})
# ... and these not in a step.
_NEVER = frozenset(
    f"__{name}__"
    for name in (
        "init_subclass", "set_name", "class_getitem", "del", "repr", "str", "reduce", "reduce_ex", "getstate",
        "setstate", "getnewargs", "getnewargs_ex", "deepcopy", "copy", "dir", "sizeof",
    )
)  # fmt: skip


def methods_of(classes: list[type], named: Set[str], is_named: bool) -> Iterator[tuple[type, str, Any]]:
    """The functions and properties of classes that code may call which names these attributes, and perhaps the class.
    Each with the class that has it and its name."""
    for cls in classes:
        for name, value in vars(cls).items():
            if isinstance(value, _METHODS) and _may_be_called(name, named, is_named):
                yield cls, name, value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _may_be_called(name: str, named: Set[str], is_named: bool) -> bool:
    if name in MAKING:
        return is_named
    if name.startswith("__") and name.endswith("__"):
        return name not in _NEVER
    return name in named or name in _IMPLICIT


def attributes_of(classes: list[type], named: Set[str]) -> Iterator[tuple[str, Any]]:
    """What else classes have under these names."""
    for cls in classes:
        for name, value in vars(cls).items():
            if name in named and not name.startswith("__") and not isinstance(value, _METHODS):
                yield name, value


def is_steady(obj: Any, name: str) -> bool:
    """Whether an attribute is there, and the same thing each time that it is asked for."""
    missing = object()
    first, second = getattr(obj, name, missing), getattr(obj, name, missing)
    return first is not missing and (first is second or (isinstance(first, PLAIN) and repr(first) == repr(second)))
