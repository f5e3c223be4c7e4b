"""Custom operators: declared once, at home in eager PyTorch, in tarry and in torch.compile.

`tarry.custom_op` declares one (declare.py) and returns a `CustomOp` (operator.py) that takes all the rest. The
functions of this module do the same by name: those of `torch._custom_ops`, argument for argument. For code that changes
nothing but an import, `tarry._custom_ops` and `tarry._custom_op.impl` have the names of PyTorch's modules.

names.py       what an operator may be called, which devices there are
types.py       annotations as types of a schema
schema.py      schemas, inferred or written by hand
declare.py     from a declaration to an operator that PyTorch knows
operator.py    CustomOp: kernels, abstract implementation, gradients, vmap, autocast
autograd.py    what happens when a gradient is wanted
lowering.py    what an operator is made of, for one backend
foreign.py     operators that torch.library declares: recorded whole
torch_library.py   what torch.library asks of an operator
conflicts.py   registrations that exclude each other
check.py       CustomOp.check
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.library import get_ctx, infer_schema

from tarry.custom_ops.declare import check_declaration, custom_op_with_schema, find_custom_op
from tarry.custom_ops.locations import caller
from tarry.custom_ops.names import parse_qualname, validate_namespace
from tarry.custom_ops.operator import CustomOp

__all__ = [
    "CustomOp",
    "custom_op",
    "get_ctx",
    "impl",
    "impl_abstract",
    "impl_backward",
    "impl_save_for_backward",
]

Function = Callable[..., Any]


def custom_op(qualname: str, func_or_schema: Function | str | None = None) -> Any:
    """Declare a functional operator, by an annotated function (also as a decorator) or by a schema. Kernels and the
    rest are registered by the other functions of this module."""
    namespace, _ = parse_qualname(qualname)
    validate_namespace(namespace)
    location = caller()

    def inner(func: Function) -> Function:
        check_declaration(qualname, func)
        custom_op_with_schema(qualname, infer_schema(func, mutates_args=()), location=location)
        return func

    if isinstance(func_or_schema, str):
        custom_op_with_schema(qualname, func_or_schema, location=location)
        return None
    return inner if func_or_schema is None else inner(func_or_schema)


def impl(qualname: str, *, device_types: str | Iterable[str] = ("cpu", "cuda"), func: Function | None = None) -> Any:
    """Register a kernel: see `CustomOp.impl`."""
    return _registered(qualname, func, lambda op: op.impl(device_types))


def impl_abstract(qualname: str, *, func: Function | None = None) -> Any:
    """Register what the results look like: see `CustomOp.impl_abstract`."""
    return _registered(qualname, func, lambda op: op.impl_abstract(), missing=RuntimeError)


def impl_save_for_backward(qualname: str, *, func: Function | None = None) -> Any:
    """Register what is kept for the backward function: see `CustomOp.impl_save_for_backward`."""
    return _registered(qualname, func, lambda op: op.impl_save_for_backward())


def impl_backward(
    qualname: str, output_differentiability: Sequence[bool] | None = None, *, func: Function | None = None
) -> Any:
    """Register the backward function: see `CustomOp.impl_backward`."""
    return _registered(qualname, func, lambda op: op.impl_backward(output_differentiability))


def _registered(
    qualname: str,
    func: Function | None,
    method: Callable[[CustomOp], Callable[[Function], Function]],
    missing: type[Exception] = ValueError,
) -> Any:
    """Register a function, or return a decorator that does. `missing` is the error for an operator there is not."""

    def inner(given: Function) -> Function:
        try:
            op = find_custom_op(qualname, also_check_torch_library=True)
        except ValueError as error:
            raise missing(str(error)) from None
        return method(op)(given)

    return inner if func is None else inner(func)


def _destroy(qualname: str) -> None:
    """Take an operator back: see `CustomOp.remove`."""
    find_custom_op(qualname).remove()
