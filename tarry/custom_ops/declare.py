"""Declaring an operator: from a function or a schema to an operator that PyTorch knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tarry.custom_ops.locations import Location, caller
from tarry.custom_ops.names import parse_qualname, validate_namespace
from tarry.custom_ops.operator import CustomOp, global_registry, install_error_callback
from tarry.custom_ops.registry import get_op
from tarry.custom_ops.schema import (
    Contract,
    Schema,
    infer,
    parse,
    parse_strictly,
    validate_function_matches_schema,
    without_name,
)


def custom_op(
    qualname: str,
    manual_schema: str | None = None,
    *,
    mutates_args: str | Iterable[str] = (),
    tags: torch.Tag | Iterable[torch.Tag] = (),
    exist_ok: bool = False,
) -> Callable[[Callable[..., Any]], CustomOp]:
    """Declare an operator by a function that has its name and its signature; the body is not used.

        @tarry.custom_op("mylib::scaled_sin")
        def scaled_sin(x: Tensor, scale: float) -> Tensor: ...

        @scaled_sin.impl("cpu")
        def _(x, scale):
            return torch.from_numpy(np.sin(x.numpy()) * scale)

        @scaled_sin.impl_abstract()
        def _(x, scale):
            return torch.empty_like(x)

    The schema is inferred from the annotations; `mutates_args` names the parameters that are written to. Or it is given
    as `manual_schema`, "(Tensor x, float scale) -> Tensor", where writes and views have PyTorch's alias annotations.
    `tags` are PyTorch's; `torch.Tag.nondeterministic_seeded` says that it draws random numbers.

    To declare it again at the same line (a module that is imported twice, or edited and reloaded), or from a notebook,
    gives the same object: what is then registered replaces what was. Anywhere else that is an error, unless `exist_ok`
    says that all of it is to be replaced. See docs/custom-operators.md.
    """
    location = caller()
    tags = _as_tuple(tags)  # an iterator would be empty the second time

    def inner(func: Callable[..., Any]) -> CustomOp:
        name = check_declaration(qualname, func)
        if manual_schema is None:
            text, contract = infer(func, qualname, mutates_args)
        else:
            if mutates_args:
                raise ValueError(
                    f"custom_op({qualname!r}): with a manual schema, writes are declared there: 'Tensor(a!) x'"
                )
            text, contract = manual_schema, Contract(qualname)
        schema = parse(name, text)
        if manual_schema is not None:
            validate_function_matches_schema(schema, func, strict=False)
        here = location.declaring(func)
        known = global_registry.get(qualname)
        again = known is not None and known._location is not None and here.is_again(known._location)
        if known is None or not (exist_ok or again):
            return _described(define(qualname, schema, here, tags=tags, contract=contract), func)
        if known._is_defined_as(schema, tags):
            known._renew(contract, here, keep=not exist_ok)
        else:
            known.remove()
            define(qualname, schema, here, tags=tags, contract=contract, into=known)
        return _described(known, func)

    return inner


def strict_custom_op(qualname: str, manual_schema: str | None = None) -> Callable[[Callable[..., Any]], CustomOp]:
    """Declare a functional operator as torch._custom_op.impl does: same arguments, and errors of the same types for the
    same mistakes."""
    location = caller()

    def inner(func: Callable[..., Any]) -> CustomOp:
        name = check_declaration(qualname, func)
        text = torch.library.infer_schema(func, mutates_args=()) if manual_schema is None else manual_schema
        schema = parse_strictly(name, text)
        if manual_schema is not None:
            validate_function_matches_schema(schema, func)
        return _described(define(qualname, schema, location, tags=()), func)

    return inner


def check_declaration(qualname: str, func: Any) -> str:
    """The operator's name. Raises ValueError unless a function can declare it."""
    if not inspect.isfunction(func):
        raise ValueError(
            f"custom_op({qualname!r}) is a decorator for a Python function, and got a {type(func).__name__}"
        )
    namespace, name = parse_qualname(qualname)
    validate_namespace(namespace)
    if func.__name__ != name:
        raise ValueError(
            f"custom_op({qualname!r}): expected the function to have name {name!r}, and it is {func.__name__!r}. "
            "Rename one of them."
        )
    return name


def _described(op: CustomOp, func: Callable[..., Any]) -> CustomOp:
    op.__module__ = func.__module__
    op.__doc__ = func.__doc__
    vars(op)["__signature__"] = inspect.signature(func)
    return op


def _as_tuple(tags: torch.Tag | Iterable[torch.Tag]) -> tuple[torch.Tag, ...]:
    return (tags,) if isinstance(tags, torch.Tag) else tuple(tags)


def define(
    qualname: str,
    schema: Schema,
    location: Location,
    *,
    tags: Iterable[torch.Tag] = (torch.Tag.needs_fixed_stride_order,),
    contract: Contract | None = None,
    into: CustomOp | None = None,
) -> CustomOp:
    """Make PyTorch know an operator, with the object `into`, which was removed, if one is given. Raises RuntimeError if
    PyTorch knows one of that name."""
    namespace, name = parse_qualname(qualname)
    known = global_registry.get(qualname)
    if known is not None:
        first = f" at {known._location}" if known._location is not None else ""
        raise RuntimeError(
            f"custom_op({qualname!r}) at {location}: an operator cannot be declared multiple times, and this one "
            f"is{first}. Give one of them another name or namespace; or, to replace it, pass exist_ok=True to "
            "tarry.custom_op, or remove() the first."
        )
    if _is_taken(qualname):
        raise RuntimeError(
            f"custom_op({qualname!r}) at {location}: an operator cannot be declared multiple times, and torch.library "
            "or a C++ library (TORCH_LIBRARY) has declared this one. Give yours another name or namespace; to register "
            "more for theirs, use tarry.custom_ops.impl and the like."
        )
    library = torch.library.Library(namespace, "FRAGMENT")
    declared_tags = tuple(tags)
    library.define(f"{name}{without_name(schema)}", tags=declared_tags)
    handle = find_ophandle(qualname)
    if into is None:
        op = CustomOp(
            library, namespace, schema, name, handle, _private_access=True, _contract=contract, _location=location
        )
    else:
        op = into
        op._bind(library, namespace, schema, name, handle, contract, location)
    op._declared_tags = set(declared_tags)  # PyTorch may have added some
    op._register_autograd()
    install_error_callback(op)
    return op


def find_ophandle(qualname: str, overload_name: str = "") -> Any:
    """The dispatcher's handle of an operator. Raises RuntimeError if there is none. Private to torch: checked on 2.11
    and 2.13."""
    return torch._C._dispatch_find_schema_or_throw(qualname, overload_name)


def _is_taken(qualname: str) -> bool:
    try:
        find_ophandle(qualname)
    except RuntimeError:
        return False
    return True


def custom_op_from_existing(op: Any) -> CustomOp:
    """A CustomOp for an operator that torch.library or a C++ library has declared, to register more for it."""
    namespace, name = parse_qualname(op.name())
    library = torch.library.Library(namespace, "FRAGMENT")
    return CustomOp(library, namespace, op._schema, name, op._handle, _private_access=True)


def find_custom_op(qualname: str, also_check_torch_library: bool = False) -> CustomOp:
    """The operator of that name. Raises RuntimeError if it was not declared here, or ValueError if not at all."""
    if qualname in global_registry:
        return global_registry[qualname]
    if not also_check_torch_library:
        raise RuntimeError(f"there is no custom operator {qualname!r}: declare it with tarry.custom_op first")
    return custom_op_from_existing(get_op(qualname))


def custom_op_with_schema(
    qualname: str, schema: str, needs_fixed_stride_order: bool = True, *, location: Location | None = None
) -> Any:
    """Declare a functional operator by its schema alone; returns its overload."""
    _, name = parse_qualname(qualname)
    parsed = parse_strictly(name, schema)
    tags = (torch.Tag.needs_fixed_stride_order,) if needs_fixed_stride_order else ()
    return define(qualname, parsed, location or caller(), tags=tags)._overload


def lower(qualname: str, backend: str, *, kernel: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what an operator is made of when a backend compiles it, for one that other code has declared, with
    `torch.library` or in C++: `@tarry.lower("torchvision::nms", "inductor")`. See `CustomOp.lower`."""
    return find_custom_op(qualname, also_check_torch_library=True).lower(backend, kernel=kernel)
