"""A list of checks: the native guard that carries them out, and what is needed to tell which one has failed."""

from __future__ import annotations

import types
from typing import Any

import torch

from tarry.native import C


class Checks:
    """Each has a path, a kind, what is expected, the object that it looks into, and where in it. All are kept alive."""

    def __init__(self) -> None:
        self.guard = C.Guard()
        self.checks: list[tuple[str, str, Any]] = []  # path, kind, what is expected
        self.objects: list[Any] = []
        self.keys: list[Any] = []

    def _add(self, path: str, kind: str, expected: Any, obj: Any, key: Any = None) -> None:
        self.checks.append((path, kind, expected))
        self.objects.append(obj)
        self.keys.append(key)

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
        """A float that may change if `failing` is told so."""
        self._add(path, "item", container[key], container, key)
        self.guard.rate(container, key, container[key])

    def tensor(self, tensor: torch.Tensor, path: str) -> None:
        self._add(path, "tensor", None, tensor)
        self.guard.tensor(tensor)
