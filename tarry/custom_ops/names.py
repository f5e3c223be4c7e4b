"""Names that an operator may have, and the devices that it may have kernels for."""

from __future__ import annotations

RESERVED_NS = {"prim", "prims", "aten", "at", "torch", "pytorch"}
"""Namespaces that would be taken for PyTorch's own."""

SUPPORTED_DEVICE_TYPE_TO_KEY = {
    "cpu": "CPU",
    "cuda": "CUDA",
    "xpu": "XPU",
    "mps": "MPS",
    "hpu": "HPU",
    "mtia": "MTIA",
    "tarry": "PrivateUse1",
}
"""Device types with the dispatch key of their kernels. Meta tensors have `impl_abstract` instead."""


def parse_qualname(qualname: str) -> tuple[str, str]:
    """The namespace and the name of "namespace::name"."""
    namespace, separator, name = qualname.partition("::")
    if not separator:
        raise ValueError(
            f"custom_op: {qualname!r} has no namespace. Write it as 'namespace::name', with the name of your package "
            f"as the namespace, such as 'mylib::{qualname or 'name'}'"
        )
    if "." in name:
        raise ValueError(
            f"custom_op: {qualname!r} names an overload, and operators declared here have no overloads. Write the name "
            f"without a dot, such as '{namespace}::{name.replace('.', '_')}'"
        )
    if not name.isidentifier():
        raise ValueError(f"custom_op: {name!r} in {qualname!r} is not a name that Python could call: use an identifier")
    return namespace, name


def mangled(namespace: str, name: str, *more: str) -> str:
    """A name for something that belongs to one operator, in a namespace where all operators have such things. The
    length keeps a::b_c and a_b::c apart."""
    return "_".join((f"_{len(namespace)}{namespace}", name, *more))


def validate_namespace(ns: str) -> None:
    """Raise ValueError for a namespace that is not a plain name, or is taken for PyTorch's."""
    if "." in ns:
        raise ValueError(
            f"custom_op: the namespace {ns!r} must be a valid variable name, without dots: {ns.replace('.', '_')!r}, "
            "say"
        )
    if ns in RESERVED_NS:
        raise ValueError(f"custom_op: {ns!r} is a reserved namespace (of PyTorch's own operators): choose another")
    if not ns.isidentifier():
        raise ValueError(f"custom_op: the namespace {ns!r} must be a valid variable name")


def validate_device_type(device_type: str) -> None:
    """Raise ValueError for a device type that no kernel can be registered for."""
    if device_type in SUPPORTED_DEVICE_TYPE_TO_KEY:
        return
    hint = " What happens on meta tensors is declared with impl_abstract." if device_type == "meta" else ""
    raise ValueError(
        f"CustomOp.impl(device_types={device_type!r}): we only support device_type in "
        f"{sorted(SUPPORTED_DEVICE_TYPE_TO_KEY)}.{hint}"
    )
