"""What a lowering is: a function from a call and its arguments, as JAX arrays, to the results.

Tables in the modules beside this one fill LOWERINGS when they are imported. A lowering need not care about the dtype of
its results: they are cast to what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax.numpy as jnp
import torch

from tarry.backends.xla.dtypes import JAX_DTYPES, promoted, wide
from tarry.ir.graph import Node
from tarry.ir.layout import TensorType
from tarry.ir.operators import operator

Array: TypeAlias = Any
"""A jax.Array. JAX's own type is of no use to a type checker here: it allows everything that an array of NumPy does."""


@dataclass
class Call:
    """A node as its lowering sees it, beside the arrays: types, and what to do about data that eager would refuse."""

    node: Node
    drawn: tuple[Array, ...] = ()
    """What a random operator draws, if that is only part of what it computes."""
    checks: list[Array] = field(default_factory=list)

    @property
    def type(self) -> TensorType:
        """The type of the first result."""
        return self.node.results[0].type

    @property
    def dtype(self) -> Any:
        """The dtype of the first result, in JAX."""
        return JAX_DTYPES[self.type.dtype]

    @property
    def wide(self) -> Any:
        """The dtype to compute the first result in."""
        return JAX_DTYPES[wide(self.type.dtype)]

    def require(self, ok: Array) -> None:
        """Have the step fail unless all of this is true. The reference path then raises eager's own error."""
        self.checks.append(jnp.all(ok))


@dataclass(frozen=True)
class Lowering:
    """`constant`: arguments whose numbers must be constants of the program. `settled`: arguments whose numbers are
    constants until they change. `when`: whether it can lower a given node, where it cannot lower every one."""

    function: Callable[..., Any]
    constant: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()
    when: Callable[[Node], bool] | None = None


LOWERINGS: dict[str, Lowering] = {}


def lowers(
    *names: str, constant: str = "", settled: str = "", when: Callable[[Node], bool] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `function(call, *arguments)` as the lowering of these operators."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            LOWERINGS[name] = Lowering(function, frozenset(constant.split()), frozenset(settled.split()), when)
        return function

    return register


# ---- operators that go element by element

Compute: TypeAlias = Callable[[Call], torch.dtype]
_NUMERIC = frozenset({"Tensor", "Optional[Tensor]", "number", "Optional[number]", "float", "Optional[float]"})


def in_result(call: Call) -> torch.dtype:
    """Compute in the dtype of the result, as arithmetic does."""
    return wide(call.type.dtype)


def in_operand(call: Call) -> torch.dtype:
    """Compute in the dtype of the operand, whatever the result's."""
    return call.node.operands[0].type.dtype


def in_promoted(call: Call) -> torch.dtype:
    """Compute in what the two operands have in common, as comparisons do."""
    return promoted(*call.node.args[:2])


def as_bool(call: Call) -> torch.dtype:
    """Compute with truth values."""
    return torch.bool


def pointwise(compute: Compute, functions: Mapping[str, Callable[..., Any]], **options: Any) -> None:
    """Register functions of JAX that take the operator's tensors and numbers, all in the dtype that `compute` says."""
    for name, function in functions.items():
        lowers(name, **options)(_pointwise(name, function, compute))


def _pointwise(name: str, function: Callable[..., Any], compute: Compute) -> Callable[..., Any]:
    numeric = [argument.type in _NUMERIC for argument in operator(name).arguments]

    def lowered(call: Call, *args: Any) -> Any:
        dtype = JAX_DTYPES[compute(call)]
        return function(
            *(cast(arg, dtype) if is_numeric else arg for arg, is_numeric in zip(args, numeric, strict=True))
        )

    return lowered


def cast(value: Any, dtype: Any) -> Any:
    """An array, or a number as an array, in a dtype. None stays None."""
    if value is None:
        return None
    array = jnp.asarray(value)
    if array.dtype == dtype:
        return array
    if dtype == jnp.bool_:
        return array != 0
    if jnp.iscomplexobj(array) and not jnp.issubdtype(dtype, jnp.complexfloating):
        array = array.real
    if dtype in _SMALL_INTEGERS and jnp.issubdtype(array.dtype, jnp.floating):
        array = array.astype(jnp.int32)  # ATen's conversion wraps around, as this then does; XLA's stops at the ends
    return array.astype(dtype)


_SMALL_INTEGERS = (jnp.uint8, jnp.int8, jnp.int16)
