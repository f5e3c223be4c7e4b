"""The interface of what `torch.library.custom_op` returns, for tarry's operators: `torch.library.register_*` and
`opcheck` take them, as objects and by name.

Private to torch: `CustomOpDef`, the table `OPDEFS` and the makers of kernels. Checked on 2.11 and 2.13.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch._library import custom_ops
from torch._library.autograd import Info, make_autograd_impl

Function = Callable[..., Any]


class LibraryOperator(custom_ops.CustomOpDef):
    """Hands what torch.library registers on to the methods of an operator of tarry's."""

    _qualname: str = ""  # a property there
    _opoverload: Any

    def __init__(self) -> None:
        self._used_triton_kernels: list[Any] = []

    def _enter(self) -> None:
        """Be found by name."""
        custom_ops.OPDEFS[self._qualname] = self

    @abstractmethod
    def impl(self, device_types: str | Iterable[str] | None) -> Callable[[Function], Function]: ...
    @abstractmethod
    def impl_abstract(self) -> Callable[[Function], Function]: ...
    @abstractmethod
    def impl_vmap(self) -> Callable[[Function], Function]: ...
    @abstractmethod
    def impl_autocast(self, device_types: str | Iterable[str], cast_inputs: torch.dtype) -> None: ...
    @abstractmethod
    def _register_torch_autograd(self, backward: Function, kernel: Function) -> None: ...

    def register_kernel(self, device_types: Any, fn: Function | None = None, /) -> Function:
        register = self.impl(device_types)
        return register if fn is None else register(fn)

    def register_fake(self, fn: Function, /) -> Function:
        return self.impl_abstract()(fn)

    def register_autograd(self, backward: Function, /, *, setup_context: Function | None = None) -> None:
        info = Info(backward, setup_context)
        self._register_torch_autograd(backward, make_autograd_impl(self._opoverload, info))

    def register_vmap(self, func: Function | None = None) -> Function:
        return self.impl_vmap() if func is None else self.impl_vmap()(func)

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype) -> None:
        self.impl_autocast(device_type, cast_inputs)

    def register_torch_dispatch(self, torch_dispatch_class: Any, fn: Function | None = None, /) -> Function:
        def register(func: Function) -> Function:
            self._lib._register_torch_dispatch_rule(self._name, torch_dispatch_class, func)
            return func

        return register if fn is None else register(fn)

    def set_kernel_enabled(self, device_type: str, enabled: bool = True) -> NoReturn:
        raise NotImplementedError(f"{self}: kernels of tarry's operators cannot be switched off; remove() the operator")


def vmap_kernel(overload: Any, function: Function) -> Function:
    """The kernel that calls a function `(info, in_dims, *args)` under torch.vmap."""
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter: Any = retrieve_current_functorch_interpreter()
        return custom_function_call_vmap_helper(interpreter, function, overload, *args, **kwargs)

    return kernel
