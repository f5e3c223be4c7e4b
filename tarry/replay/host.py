"""What a call does with tensors on the host, which a replay would not do: reading them and changing them.

Tensors that are made of Python's numbers alone, such as `torch.tensor([1.0, 2.0], device="tarry")`, are literals: like
numbers, they are constants of a replay if consecutive calls have made the same.
"""

from __future__ import annotations

import sys
from collections.abc import Set
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tarry.native import C
from tarry.replay.checks import PLAIN
from tarry.replay.rates import note_rates
from tarry.replay.reasons import NotReplayableError, where

_READS = {
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero", "__bool__", "__float__", "__int__",
    "__index__", "__complex__", "__array__", "__contains__", "__iter__",
}  # fmt: skip


_LITERALS = {"tensor", "as_tensor", "scalar_tensor", "zeros", "ones", "full", "arange", "linspace", "eye"}
_LONGEST_LITERAL = 4096
_NO_WRITES = ("__index__", "__int__", "__invert__")
_ATTRIBUTES = (torch.Tensor.grad, torch.Tensor.data, torch.Tensor.requires_grad)


class HostWatch(TorchFunctionMode):
    """Within the block, notes the first read of a host tensor's value, the first change of one, and all literals.
    `ignored` are host tensors, by id, that may be read and changed."""

    def __init__(self, trace: Any, ignored: Set[int]) -> None:
        super().__init__()
        self._trace = trace
        self._ignored = ignored
        self._found = ""
        self._literals: dict[int, torch.Tensor] = {}  # on the host, by id
        self.set_attributes: list[torch.Tensor] = []  # tensors whose .grad, .data or .requires_grad was set

    def __enter__(self) -> HostWatch:
        self._reads = C.HostReads()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._reads.stop()
        self._trace = None  # it watches for as long as it lives

    def is_literal(self, host: torch.Tensor) -> bool:
        """Whether a host tensor was made of numbers."""
        return host.numel() <= _LONGEST_LITERAL and id(host) in self._literals

    def check(self) -> None:
        """Raise what was found."""
        for tensor, location in self._reads.found:
            if not self._found and id(tensor) not in self._literals and id(tensor) not in self._ignored:
                self._found = _read(where(location))
        if self._found:
            raise NotReplayableError(self._found)

    def _is_on_host(self, args: Any) -> bool:
        """Whether the first argument, or something in it, is on the host."""
        first = args[0] if args else None
        return any(
            isinstance(value, torch.Tensor) and value.device.type == "cpu" and id(value) not in self._ignored
            for value in (first if isinstance(first, list | tuple) else (first,))
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self._found:
            if name in _READS and self._is_on_host(args):
                self._found = _read(_user_line())
            elif (_writes(name) or (kwargs and kwargs.get("out") is not None)) and self._is_on_host(args):
                self._found = (
                    f"it changes a host tensor at {_user_line()}, which a replay would not. If it is an optimizer's "
                    f"step count, give the optimizer capturable=True"
                )
        if name in ("__set__", "__delete__") and getattr(func, "__self__", None) in _ATTRIBUTES:
            self.set_attributes.append(args[0])
        result = func(*args, **(kwargs or {}))
        if name in _LITERALS and isinstance(result, torch.Tensor):
            note_rates([*args, *(kwargs or {}).values()])
            host = result if result.device.type == "cpu" else self._trace.upload_of(result)
            if host is not None and _is_plain([*args, *(kwargs or {}).values()]):
                self._literals[id(host)] = host
        return result


def _read(site: str) -> str:
    return (
        f"it reads a host tensor at {site}: a replay would not see it change. Read it outside, and pass what follows "
        f"from it as an argument, or have it on device 'tarry'"
    )


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, PLAIN)


def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITES)


def _user_line() -> str:
    """The innermost line that is not torch's or tarry's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "tarry"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
