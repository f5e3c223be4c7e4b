"""CustomOp: one operator, and everything that can be registered for it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch.compiler import is_dynamo_compiling

from tarry.custom_ops import autograd, conflicts, lowering
from tarry.custom_ops.declared import Formula
from tarry.custom_ops.locations import FuncAndLocation, Location, caller, frames_to_caller
from tarry.custom_ops.names import SUPPORTED_DEVICE_TYPE_TO_KEY, mangled, validate_device_type
from tarry.custom_ops.registry import get_op
from tarry.custom_ops.schema import Contract, Schema, defaults_of, is_functional, without_name, written_positions
from tarry.custom_ops.torch_library import LibraryOperator, vmap_kernel
from tarry.ir.operators import forget_operators
from tarry.native import C

Function = Callable[..., Any]

global_registry: dict[str, CustomOp] = {}
"""All operators that were declared here, by qualified name. It keeps them alive until they are removed."""

_LOWERING = "lowering for "


class CustomOp(LibraryOperator):
    """An operator. Call it like a function; the methods register what it does, most of them as decorators.

    `torch.ops.namespace.name` is the same operator. Made by `tarry.custom_op`, or by the functions of
    `tarry.custom_ops` for an operator that other code has declared.
    """

    def __init__(
        self,
        lib: torch.library.Library,
        cpp_ns: str,
        schema: Schema,
        operator_name: str,
        ophandle: Any,
        *,
        _private_access: bool = False,
        _contract: Contract | None = None,
        _location: Location | None = None,
    ) -> None:
        if not _private_access:
            raise RuntimeError("The CustomOp constructor is private: declare operators with tarry.custom_op")
        super().__init__()
        self._bind(lib, cpp_ns, schema, operator_name, ophandle, _contract, _location)

    def _bind(
        self,
        lib: torch.library.Library,
        cpp_ns: str,
        schema: Schema,
        operator_name: str,
        ophandle: Any,
        contract: Contract | None,
        location: Location | None,
    ) -> None:
        """Stand for an operator that PyTorch knows. Also for a second one, when it is declared anew with another
        schema: this object then is the new operator."""
        self._lib = lib
        self._cpp_ns = self._namespace = cpp_ns
        self._schema: Any = schema
        self._opname = self._name = operator_name
        self._qualname = f"{cpp_ns}::{operator_name}"
        self._ophandle = ophandle
        self._overload = self._opoverload = get_op(self._qualname)
        self._op = self._overload._op
        self._declared_tags = set(self._overload.tags)
        self._arguments: Sequence[tuple[str, bool, Any]] = defaults_of(self._overload)
        self._has_keywords = any(keyword_only for _, keyword_only, _ in self._arguments)
        self._contract = contract or Contract(self._qualname)
        self._location = location
        self._removed = False
        self._impls: dict[str, FuncAndLocation] = {}
        self._libraries: dict[str, torch.library.Library] = {}  # of each kind its own, to be replaced alone
        self._outdated: set[str] = set()  # kinds that may be registered anew: see _renew
        self._formula: Formula | None = None
        self._autograd_function = autograd.make_function(operator_name)
        self._output_differentiability: Sequence[bool] | None = None
        self._rules: torch.library.Library | None = None
        self._kernels: Any = None
        self._abstract_fn = None
        self.__name__ = operator_name
        self.__qualname__ = operator_name
        global_registry[self._qualname] = self
        self._enter()

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomOp:
        return self  # there is one operator, however many modules hold it

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self._qualname,)

    def __repr__(self) -> str:
        return f'<CustomOp(op="{self._qualname}")>'

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The overload's own __call__ does no more than this, and costs a Python frame; but it is what Dynamo knows.
        if is_dynamo_compiling():
            return self._overload(*args, **kwargs)
        return self._op(*args, **kwargs)

    # ---- kernels

    # `_stacklevel` is taken for the sake of code written for torch._custom_op: the user's line is found without it.

    def impl(
        self, device_types: str | Iterable[str] | None = ("cpu", "cuda"), _stacklevel: int = 2
    ) -> Callable[[Function], Function]:
        """Register a kernel for some types of devices: "cpu", "cuda", ..., or "tarry", where it is then called at once
        with lazy tensors instead of being recorded as one node. None: for all that have no kernel of their own."""
        self._check_alive()
        keys = {"default": "CompositeExplicitAutograd"} if device_types is None else _keys(device_types)

        def inner(func: Function) -> Function:
            for device_type, key in keys.items():
                if not self._has_impl(device_type) and not self._has_impl("default"):
                    conflicts.check_kernel(self._qualname, device_type, key)
                self._register_impl(device_type, func)
                self._library(device_type).impl(self._opname, self._contract.guard(func), key)
            self._changed()
            return func

        return inner

    def impl_factory(self) -> Callable[[Function], Function]:
        """Register the kernel of an operator that takes no tensors and makes one."""

        def inner(func: Function) -> Function:
            self._register_impl("factory", func)
            self._library("factory").impl(self._opname, self._contract.guard(func), "BackendSelect")
            return func

        return inner

    def impl_abstract(self, _stacklevel: int = 2) -> Callable[[Function], Function]:
        """Register what the results look like (shape, dtype, strides, device), given tensors without data.

        It is what tarry, torch.compile and torch.export know of the operator. For a size that depends on data, call
        `get_ctx().new_dynamic_size()`.
        """

        def inner(func: Function) -> Function:
            self._check_alive()
            if not self._has_impl("abstract"):
                conflicts.check_abstract(self._qualname)
            self._register_impl("abstract", func)
            guarded = self._contract.guard(func)
            self._library("abstract")._register_fake(self._opname, guarded, _stacklevel=frames_to_caller() + 1)
            self._abstract_fn = func
            self._changed()
            return func

        return inner

    # ---- gradients

    def impl_save_for_backward(self, _stacklevel: int = 2) -> Callable[[Function], Function]:
        """Register `function(inputs, output)`, which returns what the backward function is to be given. `inputs` is a
        named tuple of the arguments. See `impl_backward`."""

        def inner(func: Function) -> Function:
            self._register_gradient("save_for_backward", func)
            return func

        return inner

    def impl_backward(
        self, output_differentiability: Sequence[bool] | None = None, _stacklevel: int = 2
    ) -> Callable[[Function], Function]:
        """Register `function(ctx, saved, *grads)`, which returns a dict from the names of all tensor arguments to their
        gradients (None: there is none). `grads` are those of the results, with zeros where there was none.
        `ctx.needs_input_grad` says by name whose gradients are wanted.

        `output_differentiability` has a bool for each result; those that are False never require a gradient.
        """
        if output_differentiability is not None:
            self._check_differentiability(output_differentiability)

        def inner(func: Function) -> Function:
            self._register_gradient("backward", func)
            self._output_differentiability = output_differentiability
            self._update_formula()
            return func

        return inner

    def _check_differentiability(self, given: Any) -> None:
        fresh = sum(ret.alias_info is None for ret in self._schema.returns)
        count = fresh + len(written_positions(self._schema))
        if not isinstance(given, list) or not all(isinstance(item, bool) for item in given) or len(given) != count:
            raise RuntimeError(
                f"{self}: impl_backward(output_differentiability=...) takes a list of {count} "
                f"bools, one for each result of the operator, and got {given!r}"
            )

    def _register_gradient(self, kind: str, func: Function) -> None:
        self._check_alive()
        conflicts.check_differentiable(self._qualname, self._schema)
        if self._kernels is None:
            conflicts.check_autograd(self._qualname)
            self._register_autograd()
        self._register_impl(kind, func)
        self._update_formula()

    def _register_torch_autograd(self, backward: Function, kernel: Function) -> None:
        conflicts.check_differentiable(self._qualname, self._schema)
        if not is_functional(self._schema):
            raise RuntimeError(f"{self}: register_autograd takes functional operators; use impl_backward for this one")
        if self._has_impl("save_for_backward") or self._has_impl("backward"):
            raise RuntimeError(f"{self} has a backward function already: register_autograd would replace it")
        self._register_impl("autograd", backward)
        self._kernels = None
        self._library("autograd").impl(self._opname, kernel, "Autograd", with_keyset=True)

    def _update_formula(self) -> None:
        if self._has_impl("save_for_backward") and self._has_impl("backward"):
            self._formula = autograd.make_formula(self)

    def _register_autograd(self) -> None:
        """Register the native autograd kernel, and the rule that it calls when a gradient is wanted."""
        rule = mangled(self._cpp_ns, self._opname)
        if self._rules is not None:
            self._rules._destroy()
        self._rules = torch.library.Library(autograd.RULES, "FRAGMENT")
        self._rules.define(f"{rule}{without_name(self._schema)}")
        self._rules.impl(rule, autograd.make_rule(cast("CustomOp", weakref.proxy(self))), "CompositeImplicitAutograd")
        self._kernels = C.CustomOpKernels(self._qualname, f"{autograd.RULES}::{rule}")

    # ---- transforms and modes

    def impl_vmap(self) -> Callable[[Function], Function]:
        """Register what the operator does under torch.vmap: `function(info, in_dims, *args)` returns
        `(output, out_dims)`, as for torch.library.register_vmap. Without it, vmap calls the operator once for each
        element of the batch."""

        def inner(func: Function) -> Function:
            self._register_impl("vmap", func)
            kernel = vmap_kernel(self._overload, func)
            self._library("vmap").impl(self._opname, kernel, "FuncTorchBatched", with_keyset=True)
            return func

        return inner

    def impl_autocast(self, device_types: str | Iterable[str], cast_inputs: torch.dtype) -> None:
        """Under autocast on these devices, cast floating-point arguments to `cast_inputs` before the call. Without it,
        autocast leaves the operator alone."""
        location = str(caller())
        for device_type, device_key in _keys(device_types).items():
            kind = f"autocast on {device_type}"
            self._check_first(kind)
            self._impls[kind] = FuncAndLocation(self.impl_autocast, location)
            key = f"Autocast{device_key}"
            self._library(kind).impl(self._opname, lowering.autocast_kernel(self._overload, key, cast_inputs), key)

    # ---- on tarry

    def lower(self, backend: str, *, kernel: bool = False) -> Callable[[Function], Function]:
        """Register what the operator is made of when a tarry backend ("inductor", "torchscript", ...) compiles it.

        The function has the operator's signature. It is traced: what it does has to be operators of PyTorch's, which
        the backend then fuses with what is around them. With `kernel`, it is not looked into, but called with tensors
        of the backend's real device: a Triton kernel, say. Either way it has to compute what the operator computes.
        """
        lowering.check_backend(self, backend)

        def inner(func: Function) -> Function:
            self._register_impl(f"{_LOWERING}{backend}", func)
            lowering.register(self, backend, func, kernel)
            self._changed()
            return func

        return inner

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Test the operator on these arguments: its schema against what it does, its abstract implementation and its
        gradients against what it computes, recorded on tarry against called. Raises one error that lists all faults."""
        from tarry.custom_ops.check import check

        self._check_alive()
        check(self, args, kwargs)

    # ---- its life

    def remove(self) -> None:
        """Take the operator back, with all that was registered for it. The name is free again; this object is dead."""
        self._destroy()

    def _destroy(self) -> None:
        if self._removed:
            return
        self._withdraw(list(self._impls))
        self._kernels = None
        if self._rules is not None:
            self._rules._destroy()
        self._lib._destroy()
        global_registry.pop(self._qualname, None)
        forget_operators()
        # PyTorch's own handles are invalid now.
        self._removed = True
        self._op = self._overload = self._refuse

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{self} was removed, or declared anew: use the new one, or torch.ops.{self._cpp_ns}")

    def _check_alive(self) -> None:
        if self._removed:
            self._refuse()

    def _is_defined_as(self, schema: Schema, tags: tuple[torch.Tag, ...]) -> bool:
        """Whether PyTorch's definition would be the same again."""
        return str(schema) == str(self._schema) and self._declared_tags == set(tags)

    def _renew(self, contract: Contract, location: Location, *, keep: bool) -> None:
        """Be declared again with the schema it has. PyTorch's definition stays, for others hold handles of it. What is
        registered goes; or, with `keep`, it stays until it is registered anew: other modules may have registered it,
        and need not run again."""
        self._location = location
        if keep and contract == self._contract:
            self._outdated = set(self._impls)
        else:
            self._contract = contract
            self._withdraw(list(self._impls))

    def _withdraw(self, kinds: Iterable[str]) -> None:
        """Take registrations back."""
        from tarry import _api

        _api.mark_step()  # what is recorded still needs them
        for kind in kinds:
            del self._impls[kind]
            self._outdated.discard(kind)
            if kind in self._libraries:
                self._libraries.pop(kind)._destroy()
            if kind.startswith(_LOWERING):
                lowering.remove(self, kind.removeprefix(_LOWERING))
            if kind in ("save_for_backward", "backward"):
                self._formula = None
            if kind == "autograd":
                self._register_autograd()
            if kind == "abstract":
                self._abstract_fn = None
        self._changed()

    def _changed(self) -> None:
        """What tarry has inferred, compiled and proved for the operator no longer holds."""
        from tarry import _api

        _api.forget_replays()
        C.forget_operator(self._qualname)
        forget_operators()

    # ---- what is registered, and where

    def _register_impl(self, kind: str, func: Function) -> None:
        self._check_first(kind)
        self._impls[kind] = FuncAndLocation(func, str(caller()))

    def _library(self, kind: str) -> torch.library.Library:
        """Where a registration of that kind is made."""
        self._libraries[kind] = torch.library.Library(self._cpp_ns, "FRAGMENT")
        return self._libraries[kind]

    def _check_first(self, kind: str) -> None:
        self._check_alive()
        if kind in self._outdated:
            self._withdraw([kind])
        if kind in self._impls:
            raise RuntimeError(
                f"{self}: there is a {kind} impl already, registered at {self._impls[kind].location}. An operator has "
                "one; remove() the operator and declare it again to change it."
            )

    def _get_impl(self, kind: str) -> FuncAndLocation:
        return self._impls[kind]

    def _has_impl(self, kind: str) -> bool:
        return kind in self._impls


def _keys(device_types: str | Iterable[str]) -> dict[str, str]:
    """Types of devices with their dispatch keys. Raises ValueError for one that there is not."""
    wanted = [device_types] if isinstance(device_types, str) else list(device_types)
    for device_type in wanted:
        validate_device_type(device_type)
    return {device_type: SUPPORTED_DEVICE_TYPE_TO_KEY[device_type] for device_type in wanted}


def _by_name(qualname: str) -> CustomOp:
    """The operator that a pickle means."""
    if qualname not in global_registry:
        raise RuntimeError(f"there is no custom operator {qualname!r} here yet: import the module that declares it")
    return global_registry[qualname]


def report_error_callback(custom_op: Any, key: str) -> NoReturn:
    """What PyTorch calls when it finds no kernel of the operator for a dispatch key."""
    devices = {value: name for name, value in SUPPORTED_DEVICE_TYPE_TO_KEY.items()}
    if key == "Undefined":
        what = (
            "there were no Tensor inputs to this operator (an empty list of tensors, say). If it takes no tensors and "
            "makes one, register its kernel with impl_factory"
        )
    elif key == "Meta":
        what = "there is no abstract impl for tensors without data. Register one with impl_abstract"
    elif key in devices:
        what = f"there is no {devices[key]} impl registered. Register one with impl({devices[key]!r})"
    else:
        what = f"there is no implementation for dispatch key {key}. Register one with torch.library"
    raise NotImplementedError(f"{custom_op}: {what}")


def install_error_callback(op: CustomOp) -> None:
    """Have PyTorch say what to do when a kernel is missing. Private to torch: checked on 2.11 and 2.13."""
    callback = functools.partial(report_error_callback, weakref.proxy(op))
    torch._C._dispatch_set_report_error_callback(op._ophandle, callback)


def get_abstract_impl(qualname: str) -> Any:
    """The function given to `impl_abstract`, or None."""
    op = global_registry.get(qualname)
    return op._get_impl("abstract").func if op is not None and op._has_impl("abstract") else None
