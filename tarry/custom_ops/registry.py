"""All operators that were declared here, by qualified name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tarry.custom_ops.names import parse_qualname

if TYPE_CHECKING:
    from tarry.custom_ops.operator import CustomOp

global_registry: dict[str, CustomOp] = {}
"""It keeps operators alive: one that is declared stays until it is removed."""


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


def get_abstract_impl(qualname: str) -> Any:
    """The function given to `impl_abstract`, or None."""
    op = global_registry.get(qualname)
    return op._get_impl("abstract").func if op is not None and op._has_impl("abstract") else None
