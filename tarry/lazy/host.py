"""What a program that was written for the CPU does with its tensors, besides computing: arrays, loaders, files."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from tarry.lazy.devices import Devices, is_left_alone
from tarry.lazy.functions import Function
from tarry.native import C
from tarry.pytree import tree_map

_cpu = torch.Tensor.cpu  # before lazy mode replaces it


def to_numpy(original: Function, devices: Devices) -> Function:
    """`tensor.numpy()`: a copy, and so one that cannot be written: on the CPU, a write would reach the tensor."""
    cpu = torch.Tensor.cpu  # not ours: the table has that after this one

    @functools.wraps(original)
    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if self.device.type != devices.target:
            return original(self, force=force)
        array = original(cpu(self), force=force)
        array.flags.writeable = False
        return array

    return numpy


def stays(original: Function, devices: Devices) -> Function:
    """`tensor.cpu()` of a program for which that is where its tensors are."""

    @functools.wraps(original)
    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return original(self, *args, **kwargs) if is_left_alone(devices) or self.device.type != devices.target else self

    return cpu


def unpinned(original: Function, devices: Devices) -> Function:
    """`tensor.pin_memory()`, also by a `DataLoader`: there is no transfer that it would speed up."""

    @functools.wraps(original)
    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.device.type == devices.target else original(self, *args, **kwargs)

    return pin_memory


def without_device(original: Function, devices: Devices) -> Function:
    """`repr(tensor)`: a tensor of the CPU does not say where it is."""

    @functools.wraps(original)
    def text(self: torch.Tensor, **kwargs: Any) -> str:
        return str(original(self, **kwargs)).replace(f", device='{devices.target}:0'", "")

    return text


def host_lengths(original: Function, devices: Devices) -> Function:
    """`pack_padded_sequence(input, lengths, ...)` wants lengths of the host."""

    @functools.wraps(original)
    def pack(input: Any, lengths: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 - torch's name
        on_device = isinstance(lengths, torch.Tensor) and lengths.device.type == devices.target
        return original(input, _cpu(lengths) if on_device else lengths, *args, **kwargs)

    return pack


def next_batch(original: Function, devices: Devices) -> Function:
    """A batch of a `DataLoader`, computed: it is made of other elements each time, and the step reads it as a whole."""

    @functools.wraps(original)
    def next_(self: Any) -> Any:
        batch = original(self)
        tree_map(lambda leaf: C.materialise(leaf) if _is_on(leaf, devices) else None, batch)
        return batch

    return next_


def start_workers(original: Function, devices: Devices) -> Function:
    """Workers of a `DataLoader` see the dataset as it is when they start, and cannot reach the device: they are given
    it with its tensors on the host."""

    @functools.wraps(original)
    def init(self: Any, loader: Any) -> None:
        dataset = loader.dataset
        loader.__dict__["dataset"] = _host_copy(dataset, devices)
        try:
            original(self, loader)
        finally:
            loader.__dict__["dataset"] = dataset

    return init


def _host_copy(value: Any, devices: Devices) -> Any:
    """A dataset, or what it is made of, with tensors of the device replaced by copies."""
    if _is_on(value, devices):
        return _cpu(value.detach())
    if isinstance(value, torch.utils.data.Dataset):
        made = copy.copy(value)
        made.__dict__.update({name: _host_copy(each, devices) for name, each in vars(value).items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(_host_copy(each, devices) for each in value)
    if type(value) is dict:
        return {key: _host_copy(each, devices) for key, each in value.items()}
    return value


def _is_on(value: Any, devices: Devices) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == devices.target
