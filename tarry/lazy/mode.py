"""`with tarry.lazy_mode("cuda"):` puts the table into force, for all threads of the process, and takes it back."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.jit._builtins import _get_builtin_table  # private; seen in torch 2.11 to 2.13
from torch.utils._device import _device_constructors  # private; seen in torch 2.11 to 2.13

from tarry.errors import TarryError
from tarry.lazy.devices import SOURCES, Devices, Source
from tarry.lazy.table import entries, find
from tarry.native import C

_lock = threading.Lock()
_active: Devices | None = None
_ABSENT = object()


def active() -> Devices | None:
    """The pair of devices that is in force."""
    return _active


@contextmanager
def lazy_mode(device: Source) -> Iterator[None]:
    """Within the block, tensors that the program puts on `device` ("cuda" or "cpu") are recorded by tarry.

        with tarry.lazy_mode("cpu"):
            model = torch.nn.Linear(3, 3)       # its parameters are on "tarry"

    For all threads of the process. A tensor of the CPU that was made outside is copied when an operator is given it
    together with recorded ones (`"cpu"`), or has to be moved by `.to("cuda")` as ever (`"cuda"`). What was made inside
    stays on "tarry" after the block. See docs/run.md for all that is replaced, and what a program sees.
    """
    if device not in SOURCES:
        raise ValueError(f'tarry.lazy_mode takes "cuda" or "cpu", not {device!r}')
    with replacing(Devices(device)):
        yield


@contextmanager
def replacing(devices: Devices) -> Iterator[None]:
    """Have `devices.target` take the place of `devices.source` within the block."""
    global _active
    with _lock:
        if _active == devices:
            outer = True
        elif _active is not None:
            raise TarryError(f"lazy mode is on for {_active.source!r} already, and cannot be on for two devices")
        else:
            outer, _active = False, devices
    if outer:
        yield
        return
    replaced: list[tuple[Any, str, Any]] = []
    try:
        _install(devices, replaced)
        yield
    finally:
        C.set_host_mode(False, False)
        for owner, name, original in reversed(replaced):
            _get_builtin_table().pop(id(vars(owner).get(name)), None)
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        _active = None


def _install(devices: Devices, replaced: list[tuple[Any, str, Any]]) -> None:
    _device_constructors()  # keeps the functions that torch has now: it must not find ours
    _get_builtin_table()  # likewise
    for entry in entries(devices):
        owner = find(entry.owner)
        for name in entry.names:
            original = getattr(owner, name, None)
            if original is None:
                continue  # this torch does not have it, so no program uses it
            own = vars(owner).get(name, _ABSENT)
            value = entry.make(own if isinstance(own, property) else _plain(owner, name, original), devices)
            _tell_torchscript(original, value)
            replaced.append((owner, name, own))
            setattr(owner, name, value)
    if devices.target == "tarry":
        on_host = torch.device(C.real_device(0)).type == "cpu"
        C.set_host_mode(devices.source == "cpu", on_host)


def _tell_torchscript(original: Any, value: Any) -> None:
    """Have TorchScript compile a call of the replacement as one of the original: it knows builtin functions by their
    addresses, and reads the source of others."""
    builtins = _get_builtin_table()
    if name := builtins.get(id(original)):
        builtins[id(value)] = name
    elif inspect.isfunction(original) and inspect.isfunction(value):
        value.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]


def _plain(owner: Any, name: str, original: Any) -> Any:
    """The attribute as its class holds it: a descriptor of C, say."""
    if not isinstance(owner, type):
        return original
    return next(vars(each)[name] for each in owner.__mro__ if name in vars(each))


def _tag(storage: Any) -> str | None:
    """Where a storage says that it is in a file: where the program believes it is, so that it can be loaded without."""
    if _active is None or storage.device.type != _active.target or _active.target == "cpu":
        return None
    return "cpu" if _active.source == "cpu" else f"{_active.source}:{storage.device.index or 0}"


def _restore(storage: Any, location: str) -> Any:
    if _active is None or _active.source != "cuda" or not location.startswith("cuda"):
        return None
    target = torch.device(_active.replace(location))
    return storage if target.type == "cpu" else storage.to(device=target)


torch.serialization.register_package(1, _tag, _restore)  # before those of torch, which begin at 10
