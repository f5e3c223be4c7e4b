"""Pickling a tensor pickles its storage, which PyTorch writes by a raw pointer for custom devices. Ours have none.

The newer file format copies the storage to the host first, so a tarry storage is pickled in that format. Private names:
`torch.storage.TypedStorage.__reduce__` and `torch.storage._load_from_bytes` (seen in 2.11 to 2.13).

A file says on which device each tensor was. One with tensors of device tarry is loaded without tarry by
`torch.load(file, map_location="cpu")`; with `tarry.config.portable_checkpoints`, it says that they were on the CPU.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage, _load_from_bytes

_BEFORE_OTHERS = 5  # PyTorch's own devices are asked from 10 on


def install(is_portable: Callable[[], bool]) -> None:
    """Teach storages of device tarry to pickle themselves; those of other devices do as before. `is_portable`: whether
    files are to be loaded where tarry is not installed."""
    for storage_class in (TypedStorage, UntypedStorage):
        _wrap(storage_class)

    def tag(storage: Any) -> str | None:
        if storage.device.type != "tarry":
            return None
        if is_portable():
            return "cpu"
        warnings.warn(_NOT_PORTABLE, stacklevel=3)
        return None  # PyTorch's own answer: "tarry:0"

    torch.serialization.register_package(_BEFORE_OTHERS, tag, lambda storage, location: None)


_NOT_PORTABLE = (
    "tarry: this file will say that its tensors belong to device 'tarry'. Where tarry is not installed, load it with "
    "torch.load(file, map_location='cpu'); or save with tarry.config.portable_checkpoints = True "
    "(TARRY_PORTABLE_CHECKPOINTS=1), and it loads anywhere, as tensors on the CPU"
)


def _wrap(storage_class: Any) -> None:
    original = storage_class.__reduce__

    def reduce(self: Any) -> Any:
        if self.device.type != "tarry":
            return original(self)
        buffer = io.BytesIO()
        torch.save(self, buffer)
        return _load_from_bytes, (buffer.getvalue(),)

    storage_class.__reduce__ = reduce
