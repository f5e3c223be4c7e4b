"""Backends by name: built-in, registered at run time, or of another package (entry point `tarry.backends`)."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from tarry.backends.base import Backend
from tarry.errors import BackendError

_BUILT_IN = {
    "eager": "tarry.backends.eager:EagerBackend",
    "inductor": "tarry.backends.inductor:InductorBackend",
    "null": "tarry.backends.null:NullBackend",
    "torchscript": "tarry.backends.torchscript:TorchScriptBackend",
    "xla": "tarry.backends.xla:XlaBackend",
}
_registered: dict[str, Callable[..., Backend]] = {}


def register(name: str, factory: Callable[..., Backend]) -> None:
    """Make `factory(device=...)` known under a name. A later registration of the same name replaces the earlier."""
    if not name.isidentifier() and not name.replace("-", "_").isidentifier():
        raise BackendError(f"tarry.register_backend: {name!r} is not a name; use letters, digits, '_' and '-'")
    if not callable(factory):
        raise BackendError(f"tarry.register_backend({name!r}): expected a Backend class or a factory, got {factory!r}")
    if name in _BUILT_IN:
        raise BackendError(f"tarry.register_backend({name!r}): tarry has a backend of that name; choose another")
    _registered[name] = factory


def names() -> list[str]:
    """The names that `find` accepts."""
    return sorted({*_BUILT_IN, *_registered, *(point.name for point in entry_points(group="tarry.backends"))})


def find(name: str) -> Callable[..., Backend]:
    """The factory of a name, or an error that lists the names there are."""
    if name in _registered:
        return _registered[name]
    if name.startswith("dynamo:"):
        return functools.partial(adapt, name.removeprefix("dynamo:"))
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        factory: Callable[..., Backend] = getattr(import_module(module), attribute)
        return factory
    for point in entry_points(group="tarry.backends"):
        if point.name == name:
            loaded: Callable[..., Backend] = point.load()
            return loaded
    near = difflib.get_close_matches(name, names(), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise BackendError(f"there is no backend {name!r}.{hint} Known: {', '.join(names())}")


def adapt(compiler: Any, **options: Any) -> Backend:
    """The backend for a torch.compile backend: its name there, or a function that torch.compile would take."""
    from tarry.backends.dynamo import DynamoBackend

    return DynamoBackend(compiler, **options)


def default(device: str) -> tuple[str, str]:
    """The best backend that works here, and why it is not the very best."""
    try:
        from tarry.backends.inductor import why_not
    except Exception as error:  # torch's compiler cannot be imported: in a directory that is gone, for one
        return "eager", f"Inductor does not work here ({type(error).__name__}: {error})"
    reason = why_not(device)
    return ("eager", reason) if reason else ("inductor", "")
