"""A list of checks: the native guard that carries them out, and what is needed to name the one that has failed."""

from __future__ import annotations

import types
from typing import Any

import torch

from tarry.native import C

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MISSING = object()


class Checks:
    """Each has a path, a kind, what is expected, the object that it looks into, and where in it. All are kept alive."""

    def __init__(self) -> None:
        self.guard = C.Guard()
        self.checks: list[tuple[str, str, Any]] = []  # path, kind, what is expected
        self._objects: list[Any] = []
        self._keys: list[Any] = []

    def __len__(self) -> int:
        return len(self.checks)

    def _add(self, path: str, kind: str, expected: Any, obj: Any, key: Any = None) -> None:
        self.checks.append((path, kind, expected))
        self._objects.append(obj)
        self._keys.append(key)

    def dict_item(self, container: dict[Any, Any], key: Any, path: str) -> None:
        self._add(path, "item", container[key], container, key)
        self.guard.dict_item(container, key, container[key])

    def list_item(self, container: list[Any], index: int, path: str) -> None:
        self._add(path, "item", container[index], container, index)
        self.guard.list_item(container, index, container[index])

    def attribute(self, obj: Any, name: str, path: str) -> Any:
        """Returns its value, which is computed anew each time that some attributes are read."""
        value = getattr(obj, name)
        self._add(path, "attribute", value, obj, name)
        self.guard.attribute(obj, name, value)
        return value

    def cell(self, cell: types.CellType, value: Any, path: str) -> None:
        self._add(path, "cell", value, cell)
        self.guard.cell(cell, value)

    def length(self, sized: Any, path: str) -> None:
        self._add(path, "length", len(sized), sized)
        self.guard.length(sized)

    def entries(self, container: dict[Any, Any], path: str, rate: str | None = None) -> None:
        """All of a dict, but for what is under the key `rate`."""
        self._add(path, "entries", {key: value for key, value in container.items() if key is not rate}, container, rate)
        self.guard.dict_entries(container, rate)

    def rate(self, container: dict[Any, Any], key: str, path: str) -> None:
        """A float that may change where the caller of `failing` allows it."""
        self._add(path, "item", container[key], container, key)
        self.guard.rate(container, key, container[key])

    def tensor(self, tensor: torch.Tensor, path: str) -> None:
        self._add(path, "tensor", None, tensor)
        self.guard.tensor(tensor)

    def compares_plain(self, check: int) -> bool:
        """Whether only plain values are others, if a check fails."""
        _, kind, expected = self.checks[check]
        if kind != "entries":
            return isinstance(expected, PLAIN)
        now = self._objects[check]
        return len(expected) <= len(now) and all(
            now.get(key, _MISSING) is value or isinstance(value, PLAIN) for key, value in expected.items()
        )

    def explain(self, check: int) -> str:
        """What has changed, in one line."""
        path, kind, expected = self.checks[check]
        obj, key = self._objects[check], self._keys[check]
        match kind:
            case "tensor":
                return (
                    f"{path} has another shape, type, storage, requires_grad or hooks, or its .grad was set or cleared"
                )
            case "length":
                return f"{path} had {expected} entries and has {len(obj)} now"
            case "entries":
                return _explain_entries(path, expected, {k: value for k, value in obj.items() if k is not key})
        return _explain_value(path, expected, _look(kind, obj, key))


def _look(kind: str, obj: Any, key: Any) -> Any:
    try:
        if kind == "cell":
            return obj.cell_contents
        return getattr(obj, key) if kind == "attribute" else obj[key]
    except (AttributeError, KeyError, IndexError, ValueError):
        return _MISSING


def _explain_value(path: str, before: Any, now: Any) -> str:
    if isinstance(before, PLAIN) and isinstance(now, PLAIN):
        return f"{path} was {before!r} and is {now!r} now"
    return f"{path} is another object now"


def _explain_entries(path: str, before: dict[Any, Any], now: dict[Any, Any]) -> str:
    if len(before) != len(now):
        return f"{path} had {len(before)} entries and has {len(now)} now"
    for key, value in before.items():
        name = f"[{key!r}]" if isinstance(key, PLAIN) else "[...]"
        if key not in now:
            return f"{path}{name} is gone"
        same = (
            repr(now[key]) == repr(value)
            if isinstance(value, PLAIN) and isinstance(now[key], PLAIN)
            else now[key] is value
        )
        if not same:
            return _explain_value(f"{path}{name}", value, now[key])
    return f"{path} has its entries in another order"
