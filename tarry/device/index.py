"""The number of a device, given in any of the ways in which programs give it."""

from __future__ import annotations

import torch

from tarry.native import C

DeviceLike = torch.device | str | int | None


def index_of(device: DeviceLike) -> int:
    """The number of a device; None is the current one."""
    if device is None:
        return C.current_device()
    if isinstance(device, int):
        index: int | None = device
    else:
        given = torch.device(device)
        if given.type != "tarry":
            raise ValueError(f"torch.tarry: expected a tarry device, got {str(given)!r}")
        index = given.index
    if index is None:
        return C.current_device()
    if not 0 <= index < C.device_count():
        raise ValueError(f"torch.tarry: there is no device 'tarry:{index}', device_count() is {C.device_count()}")
    return index
