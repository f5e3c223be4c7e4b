"""Types of an operator's results, from PyTorch's meta kernels: the layout eager PyTorch would give them.

The recorder has already done this for every recorded node. Passes need it for the nodes they make up.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from tarry.errors import IRError
from tarry.ir.graph import HERE, Number, Value, leaves, map_leaves, typed
from tarry.ir.layout import TensorType
from tarry.ir.operators import TARRY_OPERATORS, depends_on_schemas, operator, overload


def call(op: str, args: tuple[Any, ...]) -> Any:
    """Call an operator with its arguments in schema order; tuples become lists."""
    described = operator(op)
    listed = [list(arg) if isinstance(arg, tuple) else arg for arg in args]
    positional = [arg for arg, argument in zip(listed, described.arguments, strict=True) if not argument.kwarg_only]
    keyword = {
        argument.name: arg for arg, argument in zip(listed, described.arguments, strict=True) if argument.kwarg_only
    }
    return overload(op)(*positional, **keyword)


def fresh_results(op: str, result: Any) -> list[torch.Tensor | None]:
    """The new tensors among what an operator returned, as a flat list; None where there could have been one."""
    described = operator(op)
    parts = result if len(described.returns) > 1 else (result,)
    found: list[torch.Tensor | None] = []
    for index in described.fresh:
        found.extend(parts[index] if isinstance(parts[index], list | tuple) else [parts[index]])
    return found


def infer(op: str, args: tuple[Any, ...]) -> tuple[TensorType | None, ...]:
    """The types of the results of a pure operator. Raises IRError where PyTorch refuses the call or cannot tell."""
    own = TARRY_OPERATORS.get(op)
    if own is not None:
        return (own.typing(*args),)
    return _infer(_Call(op, args))


class _Call:
    """A cache key: the call up to the identity of values and numbers."""

    __slots__ = ("args", "key", "op")

    def __init__(self, op: str, args: tuple[Any, ...]) -> None:
        self.op = op
        self.args = args
        self.key = (op, typed(map_leaves(args, _anonymous)))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self.key == other.key


def _anonymous(leaf: Any) -> Any:
    if isinstance(leaf, Value):
        return leaf.type
    if isinstance(leaf, Number):
        return (Number, leaf.kind, leaf.dtype, typed(leaf.value))  # aten::arange has as many elements as numbers say
    return leaf


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, Value):
        return torch.empty_strided(leaf.type.sizes, leaf.type.strides, dtype=leaf.type.dtype, device="meta")
    if isinstance(leaf, Number):
        return None if leaf.kind == "seed" else leaf.value
    return torch.device("meta") if leaf is HERE else leaf


@depends_on_schemas
@functools.lru_cache(maxsize=4096)
def _infer(request: _Call) -> tuple[TensorType | None, ...]:
    try:
        result = call(request.op, map_leaves(request.args, _meta))
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        raise IRError(f"{request.op}: PyTorch cannot type this call: {error}") from error
    return tuple(None if item is None else TensorType.of(item) for item in fresh_results(request.op, result))


def output_types(op: str, args: tuple[Any, ...]) -> tuple[TensorType | None, ...]:
    """The types of all outputs of a node: its fresh results, then what it writes, which keeps its type."""
    written = [leaf.type for k in operator(op).written for leaf in leaves(args[k]) if isinstance(leaf, Value)]
    return (*infer(op, args), *written)


def infer_types(op: str, args: tuple[Any, ...]) -> tuple[TensorType | None, ...]:
    """As `output_types`, of arguments that have types in place of values: what a shape function is given."""
    ids = itertools.count()
    values = map_leaves(args, lambda leaf: Value(next(ids), leaf) if isinstance(leaf, TensorType) else leaf)
    return output_types(op, values)
