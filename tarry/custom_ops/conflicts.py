"""Registrations that exclude each other, found before PyTorch's dispatcher would find them, or would not.

The functions of PyTorch that list what is registered are private: checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from tarry.custom_ops.schema import Schema, writes


def _has_kernel(qualname: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualname, key))


def check_kernel(qualname: str, device_type: str, key: str) -> None:
    """Raise RuntimeError if a device already has a kernel that was not registered here."""
    # Every operator has a kernel on tarry: the one that records it.
    taken = (
        _has_kernel(qualname, key)
        if key in ("PrivateUse1", "CompositeExplicitAutograd")
        else torch._C._dispatch_has_computed_kernel_for_dispatch_key(qualname, key)
    )
    if taken:
        raise RuntimeError(
            f"impl(device_types={device_type!r}): the operator {qualname} already has an implementation for this "
            "device type, registered with torch.library or TORCH_LIBRARY. Use that one, or remove its registration."
        )


def has_abstract(qualname: str) -> bool:
    """Whether anything says what the results look like, wherever it was registered."""
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(_has_kernel(qualname, key) for key in keys)


def is_composite(qualname: str) -> bool:
    """Whether PyTorch takes an operator apart, before and beside autograd."""
    return _has_kernel(qualname, "CompositeImplicitAutograd")


def check_abstract(qualname: str) -> None:
    """Raise RuntimeError if meta tensors already have a kernel that was not registered here."""
    if is_composite(qualname):
        raise RuntimeError(
            f"impl_abstract: the operator {qualname} already has an implementation for "
            "DispatchKey::CompositeImplicitAutograd: it is made of other operators, which say what it looks like. It "
            "needs no abstract implementation."
        )
    if _has_kernel(qualname, "Meta"):
        raise RuntimeError(
            f"impl_abstract: the operator {qualname} already has a DispatchKey::Meta implementation, registered with "
            f"torch.library or TORCH_LIBRARY. Use that one, or remove its registration."
        )


def check_autograd(qualname: str) -> None:
    """Raise RuntimeError if the operator already has an autograd kernel that was not registered here."""
    if is_composite(qualname):
        raise RuntimeError(
            f"impl_backward: the operator {qualname} already has an implementation for "
            "DispatchKey::CompositeImplicitAutograd: it is made of other operators, which have gradients of their own. "
            "It needs no backward function."
        )
    for key in ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradPrivateUse1"):
        if _has_kernel(qualname, key):
            raise RuntimeError(
                f"impl_backward: the operator {qualname} already has an autograd kernel for DispatchKey::{key}, "
                "registered with torch.library or TORCH_LIBRARY. Use that one, or remove its registration."
            )


_DIFFERENTIABLE = ("Tensor", "List[Tensor]", "int", "SymInt", "bool", "float")


def check_differentiable(qualname: str, schema: Schema) -> None:
    """Raise RuntimeError for an operator that cannot have a backward function."""

    def fail(what: str) -> NoReturn:
        raise RuntimeError(
            f"a backward function cannot be registered for {what}: {qualname} has the schema {schema}. Declare a "
            "functional operator for what is differentiated."
        )

    if not schema.returns and not writes(schema):
        fail("an operator with no returns")
    if any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns):
        fail("an operator that returns views, whose gradients are known without one")
    for ret in schema.returns:
        if str(ret.type) not in _DIFFERENTIABLE:
            fail(f"an operator that returns a {ret.type} (only {', '.join(_DIFFERENTIABLE)})")
