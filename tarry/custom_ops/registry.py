"""Operators by name, as the dispatcher has them."""

from __future__ import annotations

from typing import Any

import torch

from tarry.custom_ops.names import parse_qualname


def get_op(qualname: str) -> Any:
    """The overload `torch.ops.namespace.name.default`. Raises ValueError if there is no such operator."""
    namespace, name = parse_qualname(qualname)
    packet = getattr(getattr(torch.ops, namespace), name, None)
    overload = getattr(packet, "default", None)
    if overload is None:
        raise ValueError(
            f"there is no operator {qualname!r}: declare it first, import the module that declares it, or load its "
            "library with torch.ops.load_library"
        )
    return overload
