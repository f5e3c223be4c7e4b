"""Printing a tensor reads it once.

PyTorch formats a tensor by slicing it and reading many scalars, each of which would cut and run a graph. It has a list
of devices whose tensors are copied to the host first, which a custom device cannot join; so the one function that
formats contents is wrapped here.

Private names used: `torch._tensor_str._tensor_str(self, indent)`, seen in torch 2.11 to 2.15. Where it is missing,
printing works as before, only slower.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._tensor_str as tensor_str


def _belongs_here(tensor: torch.Tensor) -> bool:
    """Whether these are plain contents on our device: wrappers (fake, functorch, subclasses) print themselves."""
    return tensor.device.type == "tarry" and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def install() -> None:
    original = getattr(tensor_str, "_tensor_str", None)
    if original is None or hasattr(original, "_tarry"):
        return

    @functools.wraps(original)
    def format_contents(self: torch.Tensor, indent: int, *args: Any, **kwargs: Any) -> str:
        if _belongs_here(self):
            self = self.detach().cpu()
        text: str = original(self, indent, *args, **kwargs)
        return text

    format_contents._tarry = True  # type: ignore[attr-defined]
    tensor_str._tensor_str = format_contents
