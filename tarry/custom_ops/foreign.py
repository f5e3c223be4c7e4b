"""Operators that others declare, with `torch.library`.

One with a kernel for all devices (`torch.library.custom_op` without `device_types`, or CompositeExplicitAutograd) would
run that kernel on lazy tensors, and most of them need real ones. So tarry gives each of them a kernel of its own that
records the operator as one node, as long as the library that registered the other kernel lives.

The registrations of PyTorch's own namespaces stay: their kernels are made of operators that are recorded. Registrations
from C++ stay as well, for they do not pass here; they are made of operators, too. `Library.impl` is public; its
`_registration_handles`, and the table `_impls`, are private to torch: checked on 2.11 and 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tarry.native import C

_ANY_DEVICE = "CompositeExplicitAutograd"

_OF_TORCH = frozenset({"aten", "prim", "prims", "rngprims", "inductor", "quantized_decomposed", "higher_order"})


class _Handle:
    """Has an operator recorded until `destroy()`, which PyTorch calls when the library goes."""

    def __init__(self, qualname: str) -> None:
        self._kernels: C.RecordedWhole | None = C.RecordedWhole(qualname)

    def destroy(self) -> None:
        self._kernels = None


_early: list[_Handle] = []
"""Of operators that were declared before tarry was imported. Their libraries cannot be found, so they stay."""


def install() -> None:
    """Have operators with kernels for all devices recorded: those that are there, and those to come."""
    for name in torch.library._impls:
        namespace, operator, key = name.split("/")
        if key == _ANY_DEVICE and _is_recorded(namespace, operator):
            _early.append(_Handle(f"{namespace}::{operator}"))
    torch.library.Library.impl = _watched(torch.library.Library.impl)  # type: ignore[method-assign]


def _watched(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        key = dispatch_key or self.dispatch_key
        name = (op_name if isinstance(op_name, str) else op_name.name()).rpartition("::")[2]
        recorded = vars(self).setdefault("_tarry_recorded", {})
        if key == "PrivateUse1" and name in recorded:
            recorded.pop(name).destroy()  # the author has one for tarry
        result = plain(self, op_name, fn, dispatch_key, **options)
        if key == _ANY_DEVICE and name not in recorded and _is_recorded(self.ns, name):
            recorded[name] = _Handle(f"{self.ns}::{name}")
            self._registration_handles.append(recorded[name])
        return result

    return impl


def _is_recorded(namespace: str, name: str) -> bool:
    """Whether an operator is to be recorded: it is not PyTorch's, and has no kernel for tarry of its own."""
    return namespace not in _OF_TORCH and not torch._C._dispatch_has_kernel_for_dispatch_key(
        f"{namespace}::{name}", "PrivateUse1"
    )
