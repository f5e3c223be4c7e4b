"""What the parts of a custom operator know of it: the operator is made of them, so they do not import it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tarry.custom_ops.locations import FuncAndLocation
from tarry.custom_ops.schema import Schema


class Declared(Protocol):
    """A custom operator (operator.py): its names, its schema, and the functions that are registered for it."""

    _cpp_ns: str
    _opname: str
    _qualname: str
    _schema: Schema
    _op: Callable[..., Any]
    _overload: Any
    _arguments: Sequence[tuple[str, bool, Any]]
    """Of each argument: its name, whether it must be given by name, its default."""
    _has_keywords: bool
    _impls: dict[str, FuncAndLocation]
    _formula: Formula | None
    _autograd_function: Any
    _output_differentiability: Sequence[bool] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def _get_impl(self, kind: str) -> FuncAndLocation: ...
    def _has_impl(self, kind: str) -> bool: ...


@dataclass(frozen=True)
class BackwardContext:
    """What a backward function is given besides what was saved. `needs_input_grad`: by the name of the argument,
    whether its gradient is wanted; of a list, whether any is."""

    needs_input_grad: Mapping[str, bool]


@dataclass(frozen=True)
class Formula:
    """How an operator is differentiated. It has all that a graph needs which outlives the operator."""

    op: Declared
    save_for_backward: FuncAndLocation
    backward: FuncAndLocation
    output_differentiability: Sequence[bool] | None
    names: tuple[str, ...]
    """Of the arguments, in the order of the schema."""
    tensors: frozenset[str]
    """Names of those that are tensors or lists of tensors."""
    lists: frozenset[int]
    """Positions of those that are lists of tensors."""
    written: tuple[int, ...]
    """Positions of those that the operator writes to."""
    named: Callable[..., Any]
    """Makes a named tuple of the arguments."""
    function: Any
    """The autograd.Function."""
