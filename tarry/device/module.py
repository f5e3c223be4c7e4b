"""The module that PyTorch knows as `torch.tarry`.

PyTorch's own code (random, amp, checkpoint, serialization, DataLoader, accelerator) looks up functions on a device's
module by name, and so do users' scripts written for `torch.cuda`. The names below are those; a function that has no
meaning on a lazy device does nothing rather than being absent, unless nothing would be a wrong answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tarry.device import memory
from tarry.device.index import DeviceLike, index_of
from tarry.native import C

# torch.utils.checkpoint saves a device's random state only if its module says it is initialised. Ours always is: the
# generators hold their state from the start, and nothing else is waited for.
_initialized = True

_STORAGE_DTYPES = ("BFloat16", "Bool", "Byte", "Char", "ComplexDouble", "ComplexFloat", "Double", "Float", "Half")
_LEGACY_STORAGES = frozenset(f"{name}Storage" for name in (*_STORAGE_DTYPES, "Int", "Long", "Short"))

_synchronize: Callable[[], None] = lambda: None  # noqa: E731 - replaced when there is a runtime
_seed_backend: Callable[[int], None] = lambda seed: None  # noqa: E731 - likewise
_first_use: Callable[[], None] = lambda: None  # noqa: E731 - likewise


def at_first_use(action: Callable[[], None]) -> None:
    """Have `action()` called before PyTorch first makes a tensor here."""
    global _first_use
    _first_use = action


def attach(synchronize: Callable[[], None], seed: Callable[[int], None]) -> None:
    """Connect this module to the runtime: what computes all that is pending and waits for it, and what a new seed does
    to the backend."""
    global _synchronize, _seed_backend
    _synchronize, _seed_backend = synchronize, seed


# Presence and initialisation


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return not _is_in_bad_fork()


def init() -> None:
    _lazy_init()


def _lazy_init() -> None:
    """PyTorch calls this before it first makes a tensor here, so that a forked worker fails with the reason."""
    C.check_fork()
    _first_use()


def _is_in_bad_fork() -> bool:
    return C.in_bad_fork()


# Devices


def device_count() -> int:
    return C.device_count()


def current_device() -> int:
    return C.current_device()


def set_device(device: DeviceLike) -> None:
    C.set_device(index_of(device))


def _exchange_device(index: int) -> int:
    """Make a device current; gives the one that was."""
    return C.exchange_device(index)


def _maybe_exchange_device(index: int) -> int:
    """Likewise, but a negative number changes nothing."""
    return C.current_device() if index < 0 else C.exchange_device(index)


class device:  # noqa: N801 - the name that torch.cuda's has
    """Make a device current within a `with` block. None or a negative number leaves things as they are."""

    def __init__(self, device: DeviceLike) -> None:
        unchanged = device is None or (isinstance(device, int) and device < 0)
        self.index = -1 if unchanged else index_of(device)
        self.previous = -1

    def __enter__(self) -> device:
        if self.index >= 0:
            self.previous = C.exchange_device(self.index)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.index >= 0:
            C.set_device(self.previous)


class device_of(device):  # noqa: N801 - likewise
    """Make the device of a tensor current within a `with` block, if it is one of ours."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device.index if tensor.device.type == "tarry" else None)


@dataclass(frozen=True)
class DeviceProperties:
    name: str
    total_memory: int  # 0: not known
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 1


def get_device_name(device: DeviceLike = None) -> str:
    index_of(device)
    return "tarry"


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    index_of(device)
    return (0, 0)


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    return DeviceProperties(name=get_device_name(device), total_memory=mem_get_info(device)[1])


# Finishing work


def synchronize(device: DeviceLike = None) -> None:
    """Compute all that has been recorded and wait until it is done."""
    index_of(device)
    _synchronize()


# Streams and events: csrc/device/streams.h says what they are here. The classes below make PyTorch's own objects, since
# a subclass of torch.Event is refused by Event.elapsed_time and others; isinstance() works.


class _MakesTorchs(type):
    made: Any

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.made) and instance.device.type == "tarry"


class Stream(metaclass=_MakesTorchs):
    """A stream: a name for a part of the program, with an id of its own. All streams run in the program's order."""

    made = torch.Stream

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> torch.Stream:  # type: ignore[misc]
        if "stream_id" in kwargs:
            return torch.Stream(**kwargs)
        return torch.Stream(device=torch.device("tarry", index_of(device)), priority=int(priority))

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority. They are accepted, and change nothing: there is one order."""
        return (0, -1)


class Event(metaclass=_MakesTorchs):
    """An event: complete when all that was recorded before it is computed. One with `enable_timing` computes that, and
    waits for it, when it is recorded."""

    made = torch.Event

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        if interprocess:
            raise NotImplementedError(
                "torch.tarry.Event: no other process sees the device; interprocess=True is refused"
            )
        return torch.Event(device="tarry", enable_timing=enable_timing)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """This thread's stream on a device."""
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=current_stream(device).device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream this thread's current one on its device, which becomes the current device."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Run a block on a stream; None changes nothing."""
    if stream is None:
        yield
        return
    before, replaced = current_device(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(replaced)
        set_device(before)


def is_current_stream_capturing() -> bool:
    """Never: nothing runs while it is recorded, so there is nothing to capture."""
    return False


# Random numbers


def __getattr__(name: str) -> Any:
    # A tuple as on torch.cuda, but read when asked for: the number of devices is not known at import.
    if name == "default_generators":
        return tuple(C.default_generator(i) for i in range(device_count()))
    # Tensor.storage_type() looks PyTorch's legacy storage classes up here. They stand for dtypes on this device.
    if name in _LEGACY_STORAGES:
        return getattr(torch, name)
    raise AttributeError(f"module 'torch.tarry' has no attribute {name!r}")


def _get_generator(device: DeviceLike) -> torch.Generator:
    return C.default_generator(index_of(device))


def manual_seed(seed: int) -> None:
    """Seed the current device; `torch.manual_seed` seeds all devices and the CPU."""
    _get_generator(None).manual_seed(int(seed))
    _seed_backend(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _get_generator(index).manual_seed(int(seed))
    _seed_backend(int(seed))


def seed() -> int:
    """Seed the current device from the operating system; returns the seed."""
    return _get_generator(None).seed()


def seed_all() -> int:
    chosen = seed()
    manual_seed_all(chosen)
    return chosen


def initial_seed() -> int:
    return _get_generator(None).initial_seed()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """The seed and the number of random operators recorded since, as a tensor of 16 bytes on the CPU."""
    return _get_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    _get_generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# Mixed precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# Memory: see device/memory.py for what the numbers mean.

mem_get_info = memory.mem_get_info
memory_allocated = memory.memory_allocated
max_memory_allocated = memory.max_memory_allocated
memory_reserved = memory.memory_reserved
max_memory_reserved = memory.max_memory_reserved
memory_stats = memory.memory_stats
memory_summary = memory.memory_summary
memory_snapshot = memory.memory_snapshot
reset_peak_memory_stats = memory.reset_peak_memory_stats
reset_accumulated_memory_stats = memory.reset_accumulated_memory_stats
set_per_process_memory_fraction = memory.set_per_process_memory_fraction
empty_cache = memory.empty_cache
