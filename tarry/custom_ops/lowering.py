"""Lowerings per backend, and kernels that cast under autocast."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

import torch

from tarry import pytree
from tarry.backends import registry
from tarry.custom_ops.conflicts import has_abstract, is_composite
from tarry.custom_ops.declared import Declared
from tarry.custom_ops.names import mangled
from tarry.custom_ops.schema import functional_results, functional_schema, without_name, writes
from tarry.passes import lowerings

KERNELS = "tarry_lowered"
"""The namespace of the operators that kernel lowerings become."""

_libraries: dict[tuple[str, str], torch.library.Library] = {}
"""The libraries of these, by operator and backend."""

_lowered: dict[str, dict[str, Callable[..., Any]]] = {}
"""What is registered, by operator and backend."""


def check_backend(op: Declared, backend: str) -> None:
    """Raise ValueError for a backend that lowers nothing or is not known, or an operator that cannot be lowered."""
    if backend == "eager":
        raise ValueError(f"{op}: backend 'eager' runs the operator's own kernels; register one with impl instead")
    _check_name(op, backend)
    if any(ret.alias_info is not None and not ret.alias_info.is_write for ret in op._schema.returns):
        raise ValueError(
            f"{op}: a view is no node of a graph, so there is nothing to lower. Its schema is {op._schema}"
        )
    if is_composite(op._qualname):
        raise ValueError(f"{op}: PyTorch takes it apart (CompositeImplicitAutograd), so it is no node of a graph")


def _check_name(op: Declared, backend: str) -> None:
    """Refuse a name that is nearly that of a known backend. Any other may be registered later."""
    known = registry.names()
    near = difflib.get_close_matches(backend, known, n=1)
    if near and backend not in known:
        raise ValueError(f"{op}.lower: there is no backend {backend!r}. Did you mean {near[0]!r}?")


def lowered(op: Declared) -> list[str]:
    """The backends that an operator has lowerings for."""
    return sorted(_lowered.get(op._qualname, {}))


def register(op: Declared, backend: str, function: Callable[..., Any], kernel: bool) -> None:
    """Note a lowering. One that is a kernel becomes an operator of its own, which no compiler looks into."""
    lowered = _as_operator(op, backend, function) if kernel else function
    _lowered.setdefault(op._qualname, {})[backend] = lowered
    lowerings.register(backend, op._qualname, lowered)


def remove(op: Declared, backend: str) -> None:
    """Forget an operator's lowering for a backend."""
    lowerings.remove(op._qualname)
    others = _lowered.get(op._qualname, {})
    others.pop(backend, None)
    for other, lowered in others.items():
        lowerings.register(other, op._qualname, lowered)
    library = _libraries.pop((op._qualname, backend), None)
    if library is not None:
        library._destroy()


def _as_operator(op: Declared, backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if not has_abstract(op._qualname):
        raise RuntimeError(
            f"{op}: register impl_abstract before a kernel for backend {backend!r}: nothing else gives its shapes"
        )
    name = mangled(op._cpp_ns, op._opname, re.sub(r"\W", "_", backend))
    library = torch.library.Library(KERNELS, "FRAGMENT")
    schema = functional_schema(op._schema) if writes(op._schema) else without_name(op._schema)
    library.define(f"{name}{schema}", tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl(name, function, "CompositeExplicitAutograd")

    def fake(*args: Any, **kwargs: Any) -> Any:
        """The operator's own results, or those that it would have if it left its arguments alone."""
        if not writes(op._schema):
            return op._overload(*args, **kwargs)
        values = [*pytree.tree_map_only(torch.Tensor, torch.clone, args)]
        result = op._overload(*values, **kwargs)
        return functional_results(op._schema, [*values, *kwargs.values()], result)

    library._register_fake(name, fake)
    _libraries[op._qualname, backend] = library
    return lambda *args, **kwargs: getattr(getattr(torch.ops, KERNELS), name).default(*args, **kwargs)


def autocast_kernel(overload: Any, key: str, dtype: torch.dtype) -> Callable[..., Any]:
    """A kernel that casts floating-point tensors and calls the operator again, without autocast."""
    # Private to torch: checked on 2.11 and 2.13.
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
        return value.to(dtype) if is_wide else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return overload(*pytree.tree_map(cast, args), **pytree.tree_map(cast, kwargs))

    return kernel
