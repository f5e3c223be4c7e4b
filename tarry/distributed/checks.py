"""What is wrong with the arguments of a collective, said at its call: recorded, it would be wrong where it is read, and
an operator would have broadcast what has another shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_BITWISE = ("BAND", "BOR", "BXOR")
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOVED = {*_WHOLE, *_FLOATING}
"""The dtypes that gloo knows."""


def check_reduction(name: str, process_group: dist.ProcessGroup, tensor: Tensor, op: str) -> None:
    """Raise for what gloo cannot reduce, if the group has nothing else. A group of one rank sends nothing."""
    known = _WHOLE if op in _BITWISE else (*_WHOLE, *_FLOATING)
    if tensor.dtype in known or (tensor.is_complex() and op in ("SUM", "AVG", "PREMUL_SUM")):
        return
    if process_group.size() > 1 and _has_gloo_only(process_group):
        raise TypeError(
            f"{name.rstrip('_')}: gloo has no {op} of {str(tensor.dtype)[6:]}. Convert the tensor before, as with "
            f"tensor.{'to(torch.int32)' if op in _BITWISE or not tensor.is_floating_point() else 'float()'}"
        )


def _has_gloo_only(process_group: dist.ProcessGroup) -> bool:
    return all(process_group._get_backend(device).name() == "gloo" for device in process_group._device_types)


def check_list(what: str, tensors: Sequence[Tensor], process_group: dist.ProcessGroup) -> None:
    """Raise unless there is a tensor for each rank."""
    if len(tensors) != process_group.size():
        raise ValueError(f"{what}: the list has {len(tensors)} tensors, and the group {process_group.size()} ranks")


def check_like(what: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    """Raise unless tensors have a shape and a dtype."""
    for k, tensor in enumerate(tensors):
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"{what}: tensor {k} of the list is {tensor.dtype} of shape {list(tensor.shape)}, and should be "
                f"{like.dtype} of shape {list(like.shape)}"
            )


def are_alike(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)
