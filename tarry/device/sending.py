"""Tensors for other processes: queues, pipes and DataLoader workers of torch.multiprocessing.

PyTorch sends a handle to shared memory. No other process sees the device's memory, so a tarry tensor is sent by copy:
its contents travel through shared memory of the host, and become a tensor of the receiver's own device. Each tensor is
copied by itself; what is written on one side does not show on the other. Private names:
`multiprocessing.reduction.ForkingPickler._extra_reducers` (Python 3.11 to 3.13), `torch._tensor_classes` (torch 2.11
and 2.13).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # registers PyTorch's own reducers
from torch.storage import TypedStorage, UntypedStorage


def install() -> None:
    """Teach the pickler of processes about tensors of device tarry; those of other devices are sent as before."""
    for kind in (torch.Tensor, torch.nn.Parameter, *torch._tensor_classes):
        _wrap(kind, _reduce_tensor)
    for storage in (UntypedStorage, TypedStorage):
        _wrap(storage, lambda given: given.__reduce__())  # by copy: see pickling.py
    share = UntypedStorage.share_memory_

    def share_memory_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "tarry":
            warnings.warn(
                "tarry: share_memory_() does nothing: no other process sees the device's memory, and tensors are sent "
                "to other processes by copy. What they write does not show here. Keep what is shared on the CPU",
                stacklevel=3,
            )
            return self
        return share(self, *args, **kwargs)

    UntypedStorage.share_memory_ = share_memory_  # type: ignore[method-assign]


def _wrap(kind: Any, ours: Callable[[Any], Any]) -> None:
    original = ForkingPickler._extra_reducers[kind]  # type: ignore[attr-defined]

    def reduce(given: Any) -> Any:
        device = given._untyped_storage.device if isinstance(given, TypedStorage) else given.device  # or it warns
        return ours(given) if device.type == "tarry" else original(given)

    ForkingPickler.register(kind, reduce)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "tarry: a tensor that autograd has computed cannot be sent to another process with its graph; send "
            "tensor.detach()"
        )
    return _rebuild_tensor, (type(tensor), tensor.detach().cpu(), tensor.device.index, tensor.requires_grad)


def _rebuild_tensor(kind: Any, host: torch.Tensor, index: int, requires_grad: bool) -> torch.Tensor:
    """In the receiver. To find this function it has imported tarry, so that the device is there."""
    tensor = host.to(torch.device("tarry", index))
    return kind(tensor, requires_grad) if kind is torch.nn.Parameter else tensor.requires_grad_(requires_grad)
