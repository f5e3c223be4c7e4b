"""Pickling a tensor pickles its storage, which PyTorch writes by a raw pointer for custom devices. Ours have none.

The newer file format copies the storage to the host first, so a tarry storage is pickled in that format. Private names:
`torch.storage.TypedStorage.__reduce__` and `torch.storage._load_from_bytes` (seen in 2.11 to 2.13).
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage, _load_from_bytes


def install() -> None:
    """Teach storages of device tarry to pickle themselves; those of other devices do as before."""
    for storage_class in (TypedStorage, UntypedStorage):
        _wrap(storage_class)


def _wrap(storage_class: Any) -> None:
    original = storage_class.__reduce__

    def reduce(self: Any) -> Any:
        if self.device.type != "tarry":
            return original(self)
        buffer = io.BytesIO()
        torch.save(self, buffer)
        return _load_from_bytes, (buffer.getvalue(),)

    storage_class.__reduce__ = reduce
