"""Python numbers as inputs of an FX graph: operators that take a number, written with a tensor of one element instead.

An FX graph's inputs are tensors, and most arithmetic has a form that takes one where it takes a number. The numbers
come in as two vectors (float64 and int64). Computing with an element of one has to give what the number would have
given: it is cast to the type in which eager PyTorch computes, and the result to the type that was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tarry.codegen.op_table import facts
from tarry.ir.graph import Node, Number, Value

aten = torch.ops.aten
Emit = Callable[..., torch.fx.Node]
"""`emit(target, *args, **kwargs)` appends a call."""

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_FLOATING = (torch.float32, torch.float64)


def _add(emit: Emit, a: Any, b: Any, alpha: Any = 1) -> Any:
    return emit(aten.add.Tensor, a, b if _is_one(alpha) else emit(aten.mul.Tensor, b, alpha))


def _sub(emit: Emit, a: Any, b: Any, alpha: Any = 1) -> Any:
    return emit(aten.sub.Tensor, a, b if _is_one(alpha) else emit(aten.mul.Tensor, b, alpha))


def _rsub(emit: Emit, a: Any, b: Any, alpha: Any = 1) -> Any:
    return _sub(emit, b, a, alpha)


def _mul(emit: Emit, a: Any, b: Any) -> Any:
    return emit(aten.mul.Tensor, a, b)


def _div(emit: Emit, a: Any, b: Any) -> Any:
    return emit(aten.div.Tensor, a, b)


def _addcmul(emit: Emit, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    return emit(aten.add.Tensor, x, emit(aten.mul.Tensor, emit(aten.mul.Tensor, a, b), value))


def _addcdiv(emit: Emit, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    return emit(aten.add.Tensor, x, emit(aten.mul.Tensor, emit(aten.div.Tensor, a, b), value))


# On a CPU, eager multiplies by the number first: with a small one, the product does not overflow.
def _addcmul_cpu(emit: Emit, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    return emit(aten.add.Tensor, x, emit(aten.mul.Tensor, emit(aten.mul.Tensor, a, value), b))


def _addcdiv_cpu(emit: Emit, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    return emit(aten.add.Tensor, x, emit(aten.div.Tensor, emit(aten.mul.Tensor, a, value), b))


def _lerp(emit: Emit, a: Any, b: Any, weight: Any) -> Any:
    return emit(aten.lerp.Tensor, a, b, weight)


def _pow(emit: Emit, a: Any, b: Any) -> Any:
    return emit(aten.pow.Tensor_Tensor, a, b)


def _fill(emit: Emit, x: Any, value: Any) -> Any:
    return emit(aten.mul.Tensor, emit(aten.ones_like, x), value)  # added to zero, -0.0 would lose its sign


def _full(emit: Emit, size: Sequence[int], value: Any) -> Any:
    return emit(aten.clone.default, emit(aten.expand.default, value, list(size)), memory_format=torch.contiguous_format)


def _clamp(emit: Emit, x: Any, low: Any = None, high: Any = None) -> Any:
    if low is not None:
        x = _clamp_min(emit, x, low)
    return x if high is None else _clamp_max(emit, x, high)


def _clamp_min(emit: Emit, x: Any, low: Any) -> Any:
    return emit(aten.maximum.default, low, x)  # in this order: of two zeros, eager takes the value


def _clamp_max(emit: Emit, x: Any, high: Any) -> Any:
    return emit(aten.minimum.default, high, x)


def _masked_fill(emit: Emit, x: Any, mask: Any, value: Any) -> Any:
    return emit(aten.where.self, mask, value, x)


def _is_one(number: Any) -> bool:
    return isinstance(number, int | float) and number == 1


FORMS: dict[str, Callable[..., Any]] = {
    "aten::add.Tensor": _add,
    "aten::add.Scalar": _add,
    "aten::sub.Tensor": _sub,
    "aten::sub.Scalar": _sub,
    "aten::rsub.Scalar": _rsub,
    "aten::rsub.Tensor": _rsub,
    "aten::mul.Tensor": _mul,
    "aten::mul.Scalar": _mul,
    "aten::div.Tensor": _div,
    "aten::div.Scalar": _div,
    "aten::addcmul": _addcmul,
    "aten::addcdiv": _addcdiv,
    "aten::lerp.Scalar": _lerp,
    "aten::pow.Tensor_Scalar": _pow,
    "aten::pow.Scalar": _pow,
    "aten::fill.Scalar": _fill,
    "aten::full_like": _fill,
    "aten::full": _full,
    "aten::clamp": _clamp,
    "aten::clamp_min": _clamp_min,
    "aten::clamp_max": _clamp_max,
    "aten::masked_fill.Scalar": _masked_fill,
}
"""Operators whose numbers can be inputs, with the same computed from tensors. Arguments in the order of the schema."""

_CPU_FORMS = {"aten::addcmul": _addcmul_cpu, "aten::addcdiv": _addcdiv_cpu}

_CONSTANT_AT_FIRST = frozenset({"aten::pow.Tensor_Scalar", "aten::pow.Scalar", "aten::clamp", "aten::clamp_min"})
# An exponent that the compiler knows is worth a program of its own: x**2 is a multiplication, x**e a call. Bounds and
# what is masked with hardly ever change.
_ARGUMENTS = {"aten::full_like": 2, "aten::full": 2}  # how many arguments matter, where not all do
_WITH_MASK = frozenset({"aten::masked_fill.Scalar"})


def takes_number(node: Node, number: Number, varied: bool) -> bool:
    """Whether a number of a node can be an input of the graph."""
    if number.dtype not in (torch.float64, torch.int64):
        return False
    if facts(node.op).numbers_on_host:
        # It is then called through an opaque operator that takes a tensor, which is worth it for what changes.
        return varied and any(arg is number for arg in node.args)
    op = facts(node.op).element or node.op
    if op not in FORMS:
        return False
    dtypes = {value.type.dtype for value in (*node.operands, *node.results)}
    if not all(dtype.is_floating_point or dtype in (torch.int64, torch.int32, torch.bool) for dtype in dtypes):
        return False
    results = {value.type.dtype for value in node.results}
    if torch.bool in results or (number.dtype == torch.float64 and not all(d.is_floating_point for d in results)):
        return False  # logic on numbers, or a number that is truncated first
    if op == "aten::pow.Tensor_Scalar" and not all(d.is_floating_point for d in results):
        return False  # a negative power of integers is an error, which the form with tensors does not raise
    if varied:
        return True
    # Whole numbers stand for themselves as a rule: alpha=1, 1 - x, x * 2. Those that count steps are found out.
    return number.dtype == torch.float64 and op not in _CONSTANT_AT_FIRST


def with_tensors(
    emit: Emit, node: Node, args: Sequence[Any], is_number: Callable[[Any], bool], device: torch.device
) -> Any:
    """Append the calls for a node some of whose arguments are elements of the vectors of numbers."""
    (result,) = node.results
    target = result.type.dtype
    computed = torch.float32 if target in _LOW_PRECISION else target
    used = list(args[: _ARGUMENTS.get(node.op, len(args))])
    cast = []
    for position, (arg, recorded) in enumerate(zip(used, node.args, strict=False)):
        mask = node.op in _WITH_MASK and position == 1
        dtype = recorded.type.dtype if isinstance(recorded, Value) else None
        number = isinstance(arg, torch.fx.Node) and is_number(arg)
        foreign = number or (dtype is not None and dtype != target and not mask)
        if foreign and computed != target and facts(node.op).rounds_numbers:
            arg = emit(aten._to_copy.default, arg, dtype=target)
        if number or (dtype is not None and dtype != computed and not mask):
            arg = emit(aten._to_copy.default, arg, dtype=computed)
        cast.append(arg)
    form = _CPU_FORMS.get(node.op) if device.type == "cpu" else None
    made = (form or FORMS[node.op])(emit, *cast)
    if node.op == "aten::masked_fill.Scalar" or node.op == "aten::fill.Scalar" or computed != target:
        made = emit(aten._to_copy.default, made, dtype=target)
    return made
