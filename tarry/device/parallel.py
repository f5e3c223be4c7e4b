"""`nn.DataParallel` over several devices: the copies that PyTorch has in C++ for CUDA only, by `Tensor.to`.

`torch.nn.parallel` asks `torch.accelerator` for everything else. Of `torch.nn.parallel.comm`, `broadcast`,
`broadcast_coalesced`, `scatter` and `gather` end in private functions that only builds for CUDA have (2.11 and 2.13),
and `reduce_add` warns that there is no NCCL. Calls with `out=` are left to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import comm


def install() -> None:
    """Teach these functions; for tensors of other devices they do as before."""
    _wrap("broadcast", _broadcast)
    _wrap("broadcast_coalesced", _broadcast_coalesced)
    _wrap("scatter", _scatter)
    _wrap("gather", _gather)
    _wrap("reduce_add", _reduce_add)


def _wrap(name: str, ours: Callable[..., Any]) -> None:
    original = getattr(comm, name)

    @functools.wraps(original)
    def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        is_ours = any(tensor.device.type == "tarry" for tensor in listed) or (
            all(tensor.device.type == "cpu" for tensor in listed) and not torch.cuda.is_available()
        )
        if not is_ours or kwargs.get("out") is not None:
            return original(tensors, *args, **kwargs)
        kwargs.pop("out", None)
        return ours(tensors if isinstance(tensors, torch.Tensor) else listed, *args, **kwargs)

    setattr(comm, name, wrapper)


def _device(device: Any) -> torch.device:
    return torch.device("tarry", device) if isinstance(device, int) else torch.device(device)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """As PyTorch's own do it: their callers make complex numbers of the results again."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _broadcast(tensor: torch.Tensor, devices: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(_plain(tensor).to(_device(device)) for device in devices)


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[Any], buffer_size: int = 0
) -> list[list[torch.Tensor]]:
    return [[_plain(tensor).to(_device(device)) for tensor in tensors] for device in devices]


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[Any] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Any = None,
) -> tuple[torch.Tensor, ...]:
    devices = list(range(torch.accelerator.device_count())) if devices is None else devices
    tensor = _plain(tensor)
    parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return tuple(part.contiguous().to(_device(device)) for part, device in zip(parts, devices, strict=False))


def _gather(tensors: Sequence[torch.Tensor], dim: int = 0, destination: Any = None) -> torch.Tensor:
    if destination is None:
        destination = torch.accelerator.current_device_index()
    elif destination == -1:  # as PyTorch's own
        destination = "cpu"
    return torch.cat([_plain(tensor).to(_device(destination)) for tensor in tensors], dim)


def _reduce_add(tensors: Sequence[torch.Tensor], destination: Any = None) -> torch.Tensor:
    device = _device(torch.accelerator.current_device_index() if destination is None else destination)
    sizes = {tuple(tensor.shape) for tensor in tensors}
    if len(sizes) > 1:
        raise ValueError(f"reduce_add: the tensors to be added have different sizes: {sorted(sizes)}")
    first, *rest = sorted(tensors, key=lambda tensor: tensor.device != device)  # in the order of PyTorch's own
    total = first.to(device)
    for tensor in rest:
        total = total + tensor.to(device)
    return total
