"""Whether somebody can still call backward() on a tensor."""

from __future__ import annotations

from typing import Any

import torch


def graph_is_alive(tensor: torch.Tensor) -> bool:
    """Whether the graph behind a tensor still has the tensors that a backward pass needs.

    A graph that has never had any (of additions, say) cannot be told from one that was used; it counts as used.
    """
    waiting: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _keeps_tensors(node):
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


def _keeps_tensors(node: Any) -> bool:
    names = ["saved_tensors"] if hasattr(type(node), "saved_tensors") else []
    names += [name for name in dir(node) if name.startswith("_saved_")]
    for name in names:
        try:
            value = getattr(node, name)
        except (RuntimeError, AttributeError):  # freed by a backward pass
            continue
        values = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(item, torch.Tensor) for item in values):
            return True
    return False
