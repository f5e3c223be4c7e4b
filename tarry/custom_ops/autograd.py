"""Gradients: from a "save for backward" and a "backward" function to what the dispatcher calls when one is wanted.

The kernel for the Autograd key is native (csrc/custom_op.cpp), so that a call without gradients costs nothing. It hands
the others to a *rule*: an operator of the same schema in the namespace `tarry_autograd`, whose kernel is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as pytree  # not public, but stable: checked on torch 2.13

from tarry.custom_ops.places import FuncAndLocation

if TYPE_CHECKING:
    from tarry.custom_ops.operator import CustomOp

RULES = "tarry_autograd"
"""The namespace of the rules."""


@dataclass(frozen=True)
class BackwardContext:
    """What a backward function is told besides what was saved. `needs_input_grad`: by the name of the argument, whether
    its gradient is wanted; of a list, whether any is."""

    needs_input_grad: Mapping[str, bool]


@dataclass(frozen=True)
class Formula:
    """How an operator is differentiated."""

    op: CustomOp
    save_for_backward: FuncAndLocation
    backward: FuncAndLocation
    output_differentiability: Sequence[bool] | None


def make_rule(op: CustomOp) -> Callable[..., Any]:
    """The kernel that is called when an argument requires a gradient."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        formula = op._formula
        if formula is not None:
            return _apply(formula, _in_order(op, args, kwargs))
        _refuse(op)

    return rule


def _refuse(op: CustomOp) -> NoReturn:
    kinds = ("save_for_backward", "backward")
    for found, missing in (kinds, kinds[::-1]):
        if op._has_impl(found):
            raise RuntimeError(
                f"{op}: there is a '{found}' function, registered at {op._get_impl(found).location}, but we were "
                f"unable to find a '{missing}' function. A gradient takes both: register it with impl_{missing}."
            )
    raise RuntimeError(
        f"Autograd has not been implemented for operator {op._qualname}, and one of its arguments requires a gradient. "
        f"Register impl_save_for_backward and impl_backward, or call it under torch.no_grad() or on detached tensors."
    )


def _in_order(op: CustomOp, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Every argument of the schema, in its order: the dispatcher leaves out those that have their default value."""
    values = []
    for position, (name, keyword_only, default) in enumerate(op._arguments):
        if keyword_only:
            values.append(kwargs.get(name, default))
        else:
            values.append(args[position] if position < len(args) else default)
    return values


@dataclass
class _Call:
    """One call on its way through an autograd.Function, which takes flat arguments only."""

    formula: Formula
    structure: pytree.TreeSpec
    returned: pytree.TreeSpec | None = None


def _apply(formula: Formula, values: list[Any]) -> Any:
    flat, structure = pytree.tree_flatten(values)
    call = _Call(formula, structure)
    with _below_transforms():
        results = formula.op._autograd_function.apply(call, *flat)
    assert call.returned is not None
    return pytree.tree_unflatten(list(results), call.returned)


def _below_transforms() -> AbstractContextManager[None]:
    """Say to torch.func that a function that looks at none of its transforms is meant (see make_function)."""
    if not torch._C._are_functorch_transforms_active():
        return nullcontext()
    from torch._functorch.utils import enable_single_level_autograd_function

    return enable_single_level_autograd_function()


def make_function(name: str) -> Any:
    """An autograd.Function of that name: it is what users see as `grad_fn`.

    The dispatcher has taken care of the transforms of torch.func when the rule is called, as for any operator. So this
    is the function that looks at none of them, which is private to torch (checked on 2.11 and 2.13).
    """
    members = {
        "forward": staticmethod(_forward),
        "setup_context": staticmethod(_setup_context),
        "backward": staticmethod(_backward),
    }
    return type(f"{name}_customop", (torch.autograd.function._SingleLevelFunction,), members)


def _forward(call: _Call, *flat: Any) -> tuple[Any, ...]:
    op = call.formula.op
    pairs = list(zip(op._arguments, pytree.tree_unflatten(list(flat), call.structure), strict=True))
    with torch._C._AutoDispatchBelowAutograd():  # checked on torch 2.11 and 2.13
        result = op._overload(
            *(value for (_, keyword_only, _), value in pairs if not keyword_only),
            **{name: value for (name, keyword_only, _), value in pairs if keyword_only},
        )
    results, call.returned = pytree.tree_flatten(result)
    return tuple(results)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    call: _Call = inputs[0]
    assert call.returned is not None
    formula, op = call.formula, call.formula.op
    values = pytree.tree_unflatten(list(inputs[1:]), call.structure)
    result = pytree.tree_unflatten(list(output), call.returned)
    saved = formula.save_for_backward.func(_named(op, values), result)
    kinds = _named(op, [pytree.tree_map(type, value) for value in values])
    ctx.set_materialize_grads(True)
    ctx.call = call
    _save(ctx, (saved, kinds))
    _mark_non_differentiable(ctx, result, formula.output_differentiability)


def _named(op: CustomOp, values: Sequence[Any]) -> Any:
    """Values by the names of the arguments."""
    return op._named_arguments(*values)


def _save(ctx: Any, things: Any) -> None:
    """Keep anything for backward. Tensors go through save_for_backward, or they would make cycles and hide writes."""
    flat, ctx.saved_structure = pytree.tree_flatten(things)
    ctx.is_tensor = [isinstance(thing, torch.Tensor) for thing in flat]
    ctx.save_for_backward(*(thing for thing in flat if isinstance(thing, torch.Tensor)))
    ctx.others = [thing for thing in flat if not isinstance(thing, torch.Tensor)]


def _saved(ctx: Any) -> Any:
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    flat = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
    return pytree.tree_unflatten(flat, ctx.saved_structure)


def _mark_non_differentiable(ctx: Any, result: Any, differentiable: Sequence[bool] | None) -> None:
    if differentiable is None:
        return
    results = result if isinstance(result, tuple) else (result,)
    marked: list[torch.Tensor] = []
    for index, (wanted, made) in enumerate(zip(differentiable, results, strict=True)):
        tensors = made if isinstance(made, list) else [made] if isinstance(made, torch.Tensor) else []
        if wanted and not isinstance(made, torch.Tensor | list):
            raise RuntimeError(
                f"output_differentiability={list(differentiable)} says that result {index} is differentiable, but it "
                f"is not a Tensor: it is a {type(made).__name__}. Write False there."
            )
        if not wanted:
            marked.extend(tensors)
    if marked:
        ctx.mark_non_differentiable(*marked)


def _backward(ctx: Any, *flat_grads: Any) -> tuple[Any, ...]:
    call: _Call = ctx.call
    assert call.returned is not None
    grads = pytree.tree_unflatten(list(flat_grads), call.returned)
    saved, kinds = _saved(ctx)
    needed = pytree.tree_unflatten(list(ctx.needs_input_grad[1:]), call.structure)
    names = [name for name, _, _ in call.formula.op._arguments]
    context = BackwardContext({n: any(pytree.tree_leaves(need)) for n, need in zip(names, needed, strict=True)})
    found = call.formula.backward.func(context, saved, *(grads if isinstance(grads, tuple) else (grads,)))
    _GradientCheck(call.formula, kinds).run(found)
    flat: list[Any] = []
    for name, kind in zip(names, kinds, strict=True):
        missing = pytree.tree_map(lambda _: None, kind)
        given = found.get(name, missing)
        flat.extend(given if isinstance(kind, list) else [given])
    return (None, *flat)


class _GradientCheck:
    """Whether a backward function returned what it has to: a dict with a gradient for each tensor argument."""

    def __init__(self, formula: Formula, kinds: Any) -> None:
        self.formula = formula
        self.kinds = kinds

    def fail(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{self.formula.op}: its backward function, registered at {self.formula.backward.location}, {what}"
        )

    def run(self, found: Any) -> None:
        if not isinstance(found, dict):
            self.fail(
                f"has to be a dict from names of arguments to gradients in what it returns, and it returned a "
                f"{type(found).__name__}. Expected its result to be a dict."
            )
        expected = {a.name for a in self.formula.op._overload._schema.arguments if "Tensor" in str(a.type)}
        if found.keys() != expected:
            self.fail(
                f"was expected to have keys {expected or '{}'} in the dict it returns, and has {set(found)}. Each "
                "argument that is a tensor or a list of tensors has a gradient there, or None; arguments of "
                "non-Tensor-like types have none."
            )
        for name, gradient in found.items():
            kind = getattr(self.kinds, name)
            if isinstance(kind, list):
                self.check_list(name, gradient, kind)
            else:
                self.check_one(f"argument {name!r}", gradient, kind)

    def check_list(self, name: str, gradients: Any, kinds: list[type]) -> None:
        if not isinstance(gradients, list | tuple):
            self.fail(
                f"has to return a list of gradients for argument {name!r}, and returned a {type(gradients).__name__}"
            )
        if len(gradients) != len(kinds):
            self.fail(f"has to return a list for argument {name!r} of {len(kinds)} gradients but got {len(gradients)}")
        for index, (gradient, kind) in enumerate(zip(gradients, kinds, strict=True)):
            self.check_one(f"element {index} of argument {name!r} (a list of None or Tensor gradients)", gradient, kind)

    def check_one(self, what: str, gradient: Any, kind: type) -> None:
        if gradient is None:
            return
        if not isinstance(gradient, torch.Tensor):
            self.fail(f"has to return either None or a Tensor for {what}, and returned a {type(gradient).__name__}")
        if not issubclass(kind, torch.Tensor):
            self.fail(
                f"returned a gradient for {what}, which was not a Tensor but a {kind.__name__}: return None there"
            )
