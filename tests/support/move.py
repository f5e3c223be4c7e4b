"""Copies of samples on another device that keep strides, offsets and sharing of storages.

``Tensor.to`` packs a strided view; a sample that is a transposed slice of something would then no longer test what it
was made to test. Here the whole storage moves once and every tensor is cut out of it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage as one row of its dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


def _move_tensor(
    tensor: torch.Tensor, device: str, storages: dict[tuple[int, torch.dtype], torch.Tensor]
) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
    plain = tensor.detach()
    conj, neg = plain.is_conj(), plain.is_neg()
    if neg:
        plain = torch._neg_view(plain)
    if conj:
        plain = plain.conj()
    if neg and plain.is_neg():  # conj() of a negated imaginary part cannot occur in samples; keep the simple form
        plain = plain.resolve_neg()
    key = (plain.untyped_storage().data_ptr(), plain.dtype)
    if key not in storages or key[0] == 0:
        storages[key] = _flat(plain).to(device, copy=True)
    moved = storages[key].as_strided(plain.size(), plain.stride(), plain.storage_offset())
    if conj:
        moved = moved.conj()
    if neg:
        moved = torch._neg_view(moved)
    return moved.detach().requires_grad_(tensor.requires_grad)


def move(tree: Any, device: str, *, from_device: str = "cpu") -> Any:
    """A deep copy of ``tree`` with every tensor, and every mention of ``from_device``, on ``device``.

    Tensors keep their strides, offset and requires_grad; two views of one storage are two views of one storage again.
    """
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(_move_tensor(value, device, storages), requires_grad=value.requires_grad)
        if isinstance(value, torch.Tensor):
            return _move_tensor(value, device, storages)
        if isinstance(value, torch.device) and value.type == from_device:
            return torch.device(device)
        if isinstance(value, str) and value == from_device:
            return device
        return value

    return tree_map(leaf, tree)
