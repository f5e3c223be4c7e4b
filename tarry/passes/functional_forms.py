"""The pure operator behind each operator that writes to its arguments.

PyTorch has one for nearly all of them, under a name and with a schema that follow from the writing one's:
`add_.Tensor` and `add.out` -> `add.Tensor`, `_foreach_add_.List` -> `_foreach_add.List`,
`normal_` -> `normal_functional`, `_native_batch_norm_legit` -> `_native_batch_norm_legit_functional`. So they are found
by comparing schemas, once per operator; there is no table to keep up to date. This is the one place that reads
PyTorch's conventions about names; what an operator does is in the table of operators (codegen/op_table.py).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import torch

from tarry.ir.operators import Argument, Operator, depends_on_schemas, operator, overload

_OPTIONS = ("dtype", "layout", "device", "pin_memory")


@dataclass(frozen=True, slots=True)
class FunctionalForm:
    """A pure operator, and for each of its arguments the index of the writing operator's argument it takes, or None for
    one that only the pure operator has: the options of a factory function, whose out= variant reads them off `out`.
    Its results are, in order, the outputs that the writing node has."""

    op: str
    args: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class WritingForm:
    """An operator that computes what a pure one does, into its arguments. `args`: for each of its arguments, the
    argument of the pure one that it takes."""

    op: str
    args: tuple[int, ...]


@depends_on_schemas
@functools.cache
def functional_form(op: str) -> FunctionalForm | None:
    """The pure operator of a writing one, or None: it has none, or changes the tensor's metadata (`t_`, `resize_`)."""
    described = operator(op)
    if not described.is_mutable or torch.Tag.inplace_view in overload(op).tags:
        return None
    out = [argument.out for argument in described.arguments if argument.written]
    if any(out) and not all(out):
        return None  # writes to inputs and to out= as well: the pure one's results would have another order
    kept = [k for k, argument in enumerate(described.arguments) if not argument.out]
    best: FunctionalForm | None = None
    for candidate in _candidates(op):
        args = _matching(described, kept, candidate)
        if args is not None and _returns_fit(described, candidate):
            form = FunctionalForm(candidate.name, args)
            if _overload_name(candidate.name) == _overload_name(op):
                return form
            if best is None or len(form.args) < len(best.args):
                best = form
    return best


@depends_on_schemas
@functools.cache
def in_place_form(op: str) -> WritingForm | None:
    """The inverse of `functional_form`, for operators that write to what they read (no out= variants)."""
    if operator(op).is_mutable:
        return None
    namespace, _, rest = op.partition("::")
    base, _, variant = rest.partition(".")
    name = base.removesuffix("_functional") if base.endswith("_functional") else f"{base}_"
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return None
    for candidate in sorted(packet.overloads(), key=lambda found: found != (variant or "default")):
        full = f"{namespace}::{name}" + ("" if candidate == "default" else f".{candidate}")
        writing = operator(full)
        if not writing.is_mutable or any(argument.out for argument in writing.arguments):
            continue
        form, count = functional_form(full), len(writing.arguments)
        if form is not None and form.op == op and set(form.args) == set(range(count)):
            return WritingForm(full, tuple(form.args.index(k) for k in range(count)))
    return None


def _overload_name(op: str) -> str:
    return op.partition("::")[2].partition(".")[2]


def _candidates(op: str) -> list[Operator]:
    """The pure operators of the names that a functional form may have."""
    namespace, _, rest = op.partition("::")
    base = rest.partition(".")[0]
    dunder = re.fullmatch(r"__i?(\w+)__", base)
    if dunder is not None:  # __ilshift__ and out= of __lshift__
        names = [f"__{dunder[1]}__"]
    else:
        names = [base.removesuffix("_"), f"{base.removesuffix('_')}_functional"]
    found = []
    for name in names:
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:
            continue
        for variant in packet.overloads():
            full = f"{namespace}::{name}" + ("" if variant == "default" else f".{variant}")
            schema: Any = overload(full)._schema
            if all(item.alias_info is None for item in (*schema.arguments, *schema.returns)):
                found.append(operator(full))
    return found


def _matching(described: Operator, kept: list[int], candidate: Operator) -> tuple[int | None, ...] | None:
    """Which argument each of the candidate's takes, or None if the schemas do not match."""
    wanted = [(described.arguments[k].name, described.arguments[k].type) for k in kept]
    offered = [(argument.name, argument.type) for argument in candidate.arguments]
    position = {name: k for (name, _), k in zip(wanted, kept, strict=True)}
    if sorted(wanted) == sorted(offered):
        return tuple(position[name] for name, _ in offered)
    factory = any(argument.out for argument in described.arguments)
    plain = [item for item in offered if item[0] not in _OPTIONS]
    options = [argument for argument in candidate.arguments if argument.name in _OPTIONS]
    if not factory or plain != wanted or not all(_is_option(argument) for argument in options):
        return None
    return tuple(position.get(name) for name, _ in offered)


def _is_option(argument: Argument) -> bool:
    return argument.kwarg_only and argument.has_default


def _returns_fit(described: Operator, candidate: Operator) -> bool:
    """Whether the candidate returns the fresh returns, then one result per written argument."""
    fresh = [described.returns[index] for index in described.fresh]
    written = [described.arguments[index].type.replace("Optional[Tensor]", "Tensor") for index in described.written]
    return list(candidate.returns) == [*fresh, *written]
