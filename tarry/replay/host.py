"""What a call does with tensors on the host, which a replay would not do: reading them and changing them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tarry.replay.environment import is_foreign
from tarry.replay.reasons import NotReplayableError

_READS = {
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero", "__bool__", "__float__", "__int__",
    "__index__", "__complex__", "__array__", "__contains__", "__iter__",
}  # fmt: skip


class HostWatch(TorchFunctionMode):
    """Notes the first read of a host tensor's value, and the first change of one, within the block."""

    def __init__(self) -> None:
        super().__init__()
        self._found = ""

    def check(self) -> None:
        """Raise what was found."""
        if self._found:
            raise NotReplayableError(self._found)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self._found:
            if name in _READS and any(_on_host(args)):
                self._found = (
                    f"it reads a host tensor at {_user_line()}: a replay would not see it change. Read it outside, and "
                    f"pass what follows from it as an argument"
                )
            elif _writes(name, kwargs) and any(_on_host(args)):
                self._found = (
                    f"it changes a host tensor at {_user_line()}, which a replay would not. If it is an optimizer's "
                    f"step count, give the optimizer capturable=True"
                )
        return func(*args, **(kwargs or {}))


def _writes(name: str, kwargs: Any) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return in_place or operator or bool(kwargs and kwargs.get("out") is not None)


def _on_host(args: Any) -> Iterator[bool]:
    """Of what is written: the first argument."""
    first = args[0] if args else None
    for value in first if isinstance(first, list | tuple) else (first,):
        yield isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _user_line() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
