"""What custom operators are made of, for each backend by name: written by their authors, applied before a backend sees
the graph.

A table, not a method of the backend: the author of an operator and the author of a backend are different people.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_by_backend: dict[str, dict[str, Callable[..., Any]]] = {}


def register(backend: str, op: str, function: Callable[..., Any]) -> None:
    """Have `function`, written with other operators, stand for an operator ("namespace::name")."""
    _by_backend.setdefault(backend, {})[op] = function


def remove(op: str) -> None:
    """Forget an operator's lowerings for all backends."""
    for table in _by_backend.values():
        table.pop(op, None)


def lowerings_for(backend: str) -> Mapping[str, Callable[..., Any]]:
    """Operators that have a lowering for a backend, by name."""
    return dict(_by_backend.get(backend, {}))
