"""`UntypedStorage` of device tarry: what PyTorch does by reading or exchanging raw pointers, which it has none of.

Slices share memory with the storage that they are cut from, as everywhere. What reads or writes a file, or turns bytes
around, works on a copy on the host. Private names: `UntypedStorage._swap_data_ptr_` (2.13; 2.11 lacks it), `_byteswap`,
`_write_file` and `_set_from_file` (2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.storage import UntypedStorage

from tarry.native import C


def install() -> None:
    """Teach storages of device tarry; those of other devices do as before."""

    def swap(original: Callable[..., Any], self: Any, other: Any) -> Any:
        if not isinstance(other, UntypedStorage) or other.device != self.device:
            return original(self, other)
        return C.swap_storages(_bytes(self), _bytes(other))

    def item(original: Callable[..., Any], self: Any, index: Any) -> Any:
        if not isinstance(index, slice):
            return original(self, index)
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise RuntimeError(f"Trying to slice with a step of {step}, but only a step of 1 is supported")
        return C.slice_storage(_bytes(self), start, max(stop - start, 0))

    _wrap("_swap_data_ptr_", swap)
    _wrap("__getitem__", item)
    _wrap("_write_file", _read_on_host)
    _wrap("_byteswap", _write_on_host)
    _wrap("_set_from_file", _write_on_host)


def _bytes(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _read_on_host(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(self.cpu(), *args, **kwargs)


def _write_on_host(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    host = self.cpu()
    result = original(host, *args, **kwargs)
    if host.nbytes() != self.nbytes():
        self.resize_(host.nbytes())
    self.copy_(host)
    return self if result is host else result


def _wrap(name: str, ours: Callable[..., Any]) -> None:
    original = getattr(UntypedStorage, name, None)
    if original is None:
        return  # this torch does not have it, so no program calls it

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(original, self, *args, **kwargs) if self.device.type == "tarry" else original(self, *args, **kwargs)

    method.__name__ = name
    setattr(UntypedStorage, name, method)
