"""Places where a number can hide from guards. Each gives a way to read it, and one to change it; it is 2.0 at first."""

from __future__ import annotations

import array
import contextvars
import ctypes
import decimal
import functools
import gc
import importlib
import logging
import mmap
import multiprocessing
import operator
import os
import sqlite3
import struct
import sys
import tempfile
import threading
import types
import weakref
import xml.etree.ElementTree as ElementTree
from collections import ChainMap, OrderedDict, UserList, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

Place = tuple[Callable[[], float], Callable[[float], object]]


Hidden = ctypes.py_object
"""An object of C's: it has a `value`, and no guard looks into it."""


class Computed:
    """Attributes that are computed, whichever is asked for."""

    def __init__(self, slots: Hidden) -> None:
        object.__setattr__(self, "_hidden_", slots)

    def __getattr__(self, name: str) -> Any:
        return object.__getattribute__(self, "_hidden_").value


class Meta(type):
    """A class whose attributes are its class's."""

    slots = Hidden(2.0)

    @property
    def value(cls) -> float:
        return Meta.slots.value  # type: ignore[no-any-return]


class Classy(metaclass=Meta):
    """Has a value."""


class Descriptor:
    """An attribute that is computed."""

    def __init__(self) -> None:
        self.slots = Hidden(2.0)

    def __get__(self, instance: object, owner: object = None) -> float:
        return self.slots.value  # type: ignore[no-any-return]


class Defaulting(dict[str, float]):
    """A dict that has more than it contains."""

    slots = Hidden(2.0)

    def __missing__(self, key: str) -> float:
        return self.slots.value  # type: ignore[no-any-return]


def _c_object() -> Place:
    hidden = Hidden(2.0)
    return lambda: hidden.value, lambda v: setattr(hidden, "value", v)


def _environ() -> Place:
    os.environ["TARRY_HOSTILE"] = "2.0"
    return lambda: float(os.environ["TARRY_HOSTILE"]), lambda v: os.environ.__setitem__("TARRY_HOSTILE", str(v))


def _file() -> Place:
    path = Path(tempfile.mkdtemp()) / "scale"
    path.write_text("2.0")
    return lambda: float(path.read_text()), lambda v: path.write_text(str(v))


def _file_exists() -> Place:
    path = Path(tempfile.mkdtemp()) / "flag"
    return lambda: 3.0 if path.exists() else 2.0, lambda _: path.touch()


class Slotted:
    """An object without a __dict__."""

    __slots__ = ("value",)


def _slots() -> Place:
    hidden = Slotted()
    hidden.value = 2.0
    return lambda: hidden.value, lambda v: setattr(hidden, "value", v)


def _event() -> Place:
    event = threading.Event()
    return lambda: 3.0 if event.is_set() else 2.0, lambda _: event.set()


def _lock() -> Place:
    lock = threading.Lock()
    return lambda: 3.0 if lock.locked() else 2.0, lambda _: lock.acquire()


def _package() -> Place:
    name = f"hostile_package_{len(sys.modules)}"
    package = sys.modules[name] = types.ModuleType(name)
    exec("value = 2.0\ndef read(): return value", package.__dict__)

    def read() -> float:
        return importlib.import_module(name).read()  # type: ignore[no-any-return]

    return read, lambda v: setattr(package, "value", v)


def _array() -> Place:
    hidden = array.array("d", [2.0])
    return lambda: hidden[0], lambda v: hidden.__setitem__(0, v)


def _bytearray() -> Place:
    hidden = bytearray([2])
    return lambda: float(hidden[0]), lambda v: hidden.__setitem__(0, int(v))


def _memoryview() -> Place:
    hidden = memoryview(bytearray(struct.pack("d", 2.0))).cast("d")
    return lambda: hidden[0], lambda v: hidden.__setitem__(0, v)


def _mmap() -> Place:
    hidden = mmap.mmap(-1, 8)
    hidden[:8] = struct.pack("d", 2.0)
    return lambda: struct.unpack("d", hidden[:8])[0], lambda v: hidden.__setitem__(slice(0, 8), struct.pack("d", v))


def _ctypes() -> Place:
    hidden = ctypes.c_double(2.0)
    return lambda: hidden.value, lambda v: setattr(hidden, "value", v)


def _numpy() -> Place:
    hidden = numpy.array([2.0])
    return lambda: float(hidden[0]), lambda v: hidden.__setitem__(0, v)


def _numpy_scalar_array() -> Place:
    hidden = numpy.array(2.0)
    return lambda: hidden.item(), lambda v: hidden.fill(v)


def _deque() -> Place:
    hidden = deque([2.0])
    return lambda: hidden[0], lambda v: hidden.__setitem__(0, v)


def _set() -> Place:
    hidden = {2.0}

    def change(v: float) -> None:
        hidden.clear()
        hidden.add(v)

    return lambda: next(iter(hidden)), change


def _user_list() -> Place:
    hidden = UserList([2.0])
    return lambda: hidden[0], lambda v: hidden.__setitem__(0, v)


def _chain_map() -> Place:
    hidden: ChainMap[str, float] = ChainMap({}, {"value": 2.0})
    return lambda: hidden["value"], lambda v: hidden.maps[1].__setitem__("value", v)


def _ordered_dict() -> Place:
    hidden = OrderedDict(a=2.0, b=3.0)
    return lambda: next(iter(hidden.values())), lambda _: hidden.move_to_end("a")


def _defaulting() -> Place:
    hidden = Defaulting()
    Defaulting.slots.value = 2.0
    return lambda: hidden["value"], lambda v: setattr(Defaulting.slots, "value", v)


def _context_variable() -> Place:
    hidden: contextvars.ContextVar[float] = contextvars.ContextVar("hidden", default=2.0)
    return lambda: hidden.get(), lambda v: hidden.set(v)


def _thread_local() -> Place:
    hidden = threading.local()
    hidden.value = 2.0
    return lambda: hidden.value, lambda v: setattr(hidden, "value", v)


def _computed_attribute() -> Place:
    slots = Hidden(2.0)
    hidden = Computed(slots)
    return lambda: hidden.anything, lambda v: setattr(slots, "value", v)


def _metaclass() -> Place:
    Meta.slots.value = 2.0
    return lambda: Classy.value, lambda v: setattr(Meta.slots, "value", v)


def _descriptor() -> Place:
    class Owner:
        value = Descriptor()

    owner = Owner()
    return lambda: owner.value, lambda v: setattr(Owner.__dict__["value"].slots, "value", v)


def _deep_object() -> Place:
    deepest = types.SimpleNamespace(value=2.0)
    hidden = deepest
    for _ in range(6):
        hidden = types.SimpleNamespace(inner=hidden)
    return lambda: hidden.inner.inner.inner.inner.inner.inner.value, lambda v: setattr(deepest, "value", v)


def _deep_function() -> Place:
    value = 2.0

    def read() -> float:
        return value

    def change(v: float) -> None:
        nonlocal value
        value = v

    found: Callable[[], float] = read
    for _ in range(6):
        found = functools.partial(lambda inner: inner(), found)
    return found, change


def _generator_frame() -> Place:
    def run() -> Iterator[float]:
        value = 2.0
        while True:
            value = yield value  # type: ignore[misc]

    hidden = run()
    next(hidden)
    return lambda: hidden.gi_frame.f_locals["value"], lambda v: hidden.send(v)  # type: ignore[attr-defined]


def _weak_reference() -> Place:
    alive = [threading.Event()]
    reference = weakref.ref(alive[0])
    return lambda: 2.0 if reference() is not None else 3.0, lambda _: alive.clear()


def _shared_value() -> Place:
    hidden = multiprocessing.Value("d", 2.0)
    return lambda: hidden.value, lambda v: setattr(hidden, "value", v)


def _database() -> Place:
    hidden = sqlite3.connect(":memory:", check_same_thread=False)
    hidden.execute("create table t (v real)")
    hidden.execute("insert into t values (2.0)")
    return lambda: hidden.execute("select v from t").fetchone()[0], lambda v: hidden.execute("update t set v = ?", (v,))


def _element() -> Place:
    hidden = ElementTree.Element("e", value="2.0")
    return lambda: float(hidden.get("value") or 0), lambda v: hidden.set("value", str(v))


def _logger() -> Place:
    logger = logging.getLogger("tarry.hostile")
    logger.setLevel(logging.WARNING)
    return lambda: 3.0 if logger.isEnabledFor(logging.DEBUG) else 2.0, lambda _: logger.setLevel(logging.DEBUG)


def _decimal_context() -> Place:
    decimal.getcontext().prec = 2
    return lambda: float(decimal.getcontext().prec), lambda v: setattr(decimal.getcontext(), "prec", int(v))


def _garbage_collector() -> Place:
    threshold = gc.get_threshold()
    gc.set_threshold(*threshold[:2], 2)
    return lambda: float(gc.get_threshold()[2]), lambda v: gc.set_threshold(*threshold[:2], int(v))


def _working_directory() -> Place:
    first, second = tempfile.mkdtemp(suffix="2"), tempfile.mkdtemp(suffix="3")
    old = os.getcwd()
    os.chdir(first)
    return lambda: 3.0 if os.getcwd().endswith("3") else 2.0, lambda v: os.chdir(second if v == 3.0 else old)


def _partial_of_builtin() -> Place:
    hidden = Hidden(2.0)
    return functools.partial(getattr, hidden, "value"), lambda v: setattr(hidden, "value", v)


def _getter() -> Place:
    hidden = types.SimpleNamespace(a=Hidden(2.0))
    get = operator.attrgetter("a.value")
    return lambda: get(hidden), lambda v: setattr(hidden.a, "value", v)


def _cached() -> Place:
    hidden = Hidden(2.0)

    @functools.cache
    def read() -> float:
        return hidden.value  # type: ignore[no-any-return]

    def change(v: float) -> None:
        hidden.value = v
        read.cache_clear()

    return read, change


def _host_tensor_by_pointer() -> Place:
    hidden = torch.tensor([2.0], dtype=torch.float64)
    address = ctypes.cast(hidden.data_ptr(), ctypes.POINTER(ctypes.c_double))
    kept = [hidden]
    return lambda: address[0] + 0 * len(kept), lambda v: hidden.fill_(v)


def _tensor_attribute() -> Place:
    hidden = Hidden(torch.zeros(1))
    hidden.value.scale = 2.0
    return lambda: hidden.value.scale, lambda v: setattr(hidden.value, "scale", v)


PLACES: dict[str, Callable[[], Place]] = {
    name.strip("_"): value
    for name, value in list(globals().items())
    if isinstance(value, types.FunctionType) and value.__annotations__.get("return") == "Place"
}
