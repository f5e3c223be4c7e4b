"""Whether backward() can still be called on a tensor."""

from __future__ import annotations

from typing import Any

import torch


def graph_is_alive(tensor: torch.Tensor) -> bool:
    """Whether a backward pass can still go through the autograd graph of a tensor.

    A pass that is over has freed what the graph had saved. A graph that never had anything to save (of additions, say)
    cannot be distinguished from a fresh one, and counts as alive.
    """
    waiting: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    was_used = False
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        keeps, freed = _saved(node)
        if keeps:
            return True
        was_used = was_used or freed
        waiting += [following for following, _ in node.next_functions]
    return not was_used


def _saved(node: Any) -> tuple[bool, bool]:
    """Whether a node of the graph has tensors that it has saved, and whether it had some that are freed."""
    names = ["saved_tensors"] if hasattr(type(node), "saved_tensors") else []
    names += [name for name in dir(node) if name.startswith("_saved_")]
    freed = False
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError:  # freed by a backward pass
            freed = True
            continue
        except AttributeError:
            continue
        values = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(item, torch.Tensor) for item in values):
            return True, freed
    return False, freed
