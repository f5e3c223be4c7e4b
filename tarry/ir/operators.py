"""What the IR knows about operators: schemas of PyTorch's, and the few operators of its own.

PyTorch's operators are looked up once and boiled down to the questions that the IR asks: which arguments are written,
which returns are fresh tensors, is it random. tarry's own operators are data in TARRY_OPERATORS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tarry.errors import IRError
from tarry.ir.layout import Layout, TensorType

STRIDED_VIEW = "tarry::strided_view"
STRIDED_SCATTER = "tarry::strided_scatter"

COLLECTIVES = frozenset(
    f"tarry_c10d::{name}"
    for name in (
        "all_reduce_",
        "broadcast_",
        "reduce_",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
    )
)
"""Operators that communicate with other processes (tarry/distributed). No backend compiles them: they run on the real
device inside the step, each once, in the order of the program."""

Cached = TypeVar("Cached")


@dataclass(frozen=True, slots=True)
class Argument:
    """`type` is the schema's, spelled as torch does: Tensor, Optional[Tensor], List[int], number, ScalarType, ..."""

    name: str
    type: str
    kwarg_only: bool
    written: bool
    out: bool
    has_default: bool
    default: Any


@dataclass(frozen=True, slots=True)
class Operator:
    """`written`: indices of the arguments that the operator writes to. `fresh`: indices of the returns that are new
    tensors or lists of them, that is neither one of the written arguments again nor a number. `returns`: the types of
    all returns."""

    name: str
    arguments: tuple[Argument, ...]
    returns: tuple[str, ...]
    written: tuple[int, ...]
    fresh: tuple[int, ...]
    random: bool

    @property
    def is_mutable(self) -> bool:
        return bool(self.written)

    @property
    def fresh_count(self) -> int | None:
        """How many fresh outputs a node has, or None where a returned list leaves it open."""
        if any(self.returns[index] != "Tensor" for index in self.fresh):
            return None
        return len(self.fresh)

    def index_of(self, name: str) -> int:
        """Position of an argument by its name; -1 if there is none."""
        return next((k for k, argument in enumerate(self.arguments) if argument.name == name), -1)


@dataclass(frozen=True, slots=True)
class TarryOperator:
    """An operator that exists in graphs only. `typing` maps the arguments to the output's type."""

    name: str
    schema: str
    meaning: str
    typing: Callable[..., TensorType]


def _strided_view_type(value: Any, dtype: Any, sizes: Any, strides: Any, offset: Any) -> TensorType:
    return TensorType(dtype, sizes, strides)


def _strided_scatter_type(base: Any, src: Any, dtype: Any, sizes: Any, strides: Any, offset: Any) -> TensorType:
    result: TensorType = base.type
    return result


TARRY_OPERATORS: dict[str, TarryOperator] = {
    operator.name: operator
    for operator in (
        TarryOperator(
            STRIDED_VIEW,
            "tarry::strided_view(Tensor value, ScalarType dtype, int[] sizes, int[] strides, int offset) -> Tensor",
            "The buffer of `value` seen through a layout: element i lies at offset + sum(i * strides), counted in "
            "elements of `dtype`, which need not be the dtype of `value` (the bytes are reinterpreted).",
            _strided_view_type,
        ),
        TarryOperator(
            STRIDED_SCATTER,
            "tarry::strided_scatter(Tensor base, Tensor src, ScalarType dtype, int[] sizes, int[] strides, int offset)"
            " -> Tensor",
            "`base` with `src` written into its buffer through a layout. `src` has that layout's dtype and sizes and "
            "any strides; the result has the type of `base`.",
            _strided_scatter_type,
        ),
    )
}

HIDDEN_WRITES: dict[str, str] = {
    "aten::native_batch_norm": "aten::_native_batch_norm_legit",
}
"""Operators whose schema does not admit that they write to their arguments, with the operator of the same arguments
that does. A recorded node with written storages is renamed, so that schemas can be trusted everywhere else."""


def view_of(args: tuple[Any, ...]) -> Layout:
    """The layout in the last four arguments of a tarry::strided_* node."""
    return Layout(*args[-4:])


def overload(name: str) -> Any:
    """The callable torch.ops overload of 'namespace::name.overload' (no overload: the default one)."""
    namespace, _, rest = name.partition("::")
    base, _, variant = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), variant or "default")
    except (AttributeError, RuntimeError):
        raise IRError(f"there is no operator {name!r}: if it is a custom operator, import its module first") from None


_caches: list[Any] = []


def depends_on_schemas(cached: Cached) -> Cached:
    """Mark a cached function whose results no longer hold when an operator changes."""
    _caches.append(cached)
    return cached


def forget_operators() -> None:
    """Look schemas up anew: a custom operator was removed or has changed."""
    for cached in _caches:
        cached.cache_clear()


@depends_on_schemas
@functools.cache
def operator(name: str) -> Operator:
    """The schema of an operator. Raises IRError if there is none of that name."""
    random = False
    own = TARRY_OPERATORS.get(name)
    if own is not None:
        schema = torch._C.parse_schema(own.schema)
    else:
        found = overload(name)
        schema = found._schema
        random = torch.Tag.nondeterministic_seeded in found.tags
    arguments = tuple(
        Argument(
            name=argument.name,
            type=str(argument.real_type),
            kwarg_only=argument.kwarg_only,
            written=argument.alias_info is not None and argument.alias_info.is_write,
            out=argument.is_out,
            has_default=argument.has_default_value(),
            default=argument.default_value,
        )
        for argument in schema.arguments
    )
    return Operator(
        name=name,
        arguments=arguments,
        returns=tuple(str(ret.real_type) for ret in schema.returns),
        written=tuple(k for k, argument in enumerate(arguments) if argument.written),
        fresh=tuple(
            k
            for k, ret in enumerate(schema.returns)
            if "Tensor" in str(ret.real_type) and not (ret.alias_info is not None and ret.alias_info.is_write)
        ),
        random=random,
    )


def draws_nothing(op: str, args: tuple[Any, ...]) -> bool:
    """Whether a random operator is random in name only: attention without dropout."""
    position = operator(op).index_of("dropout_p")
    return position >= 0 and args[position] == 0.0


def list_length(op: str, args: tuple[Any, ...], outputs: int, index: int) -> int | None:
    """How many of a node's outputs belong to return `index`, which is a list; None where the schema leaves it open.

    A fused optimizer returns each list that it updates, under that argument's name with `_out` behind it.
    """
    described = operator(op)
    source = described.index_of(overload(op)._schema.returns[index].name.removesuffix("_out"))
    if source >= 0:
        return len(args[source])
    if sum(described.returns[k] != "Tensor" for k in described.fresh) > 1:
        return None
    return outputs - len(described.fresh) + 1
