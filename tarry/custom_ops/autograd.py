"""Gradients: from a "save for backward" and a "backward" function to what the dispatcher calls when one is wanted.

The kernel for the Autograd key is native (csrc/record/custom_op.cpp), so that a call without gradients costs nothing.
It hands the others to a *rule*: an operator of the same schema in the namespace `tarry_autograd`, whose kernel is made
here.

An operator that writes is called on copies, and differentiated as if it returned the new contents after its results;
then PyTorch copies them to where they belong. A view needs no functions: its gradient is that of the strided view that
it is. Forward-mode AD needs none either: a backward function is linear in the gradients it is given, so its own
derivative with respect to them is the product of the Jacobian with the tangents.
"""

from __future__ import annotations

import operator
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from tarry import pytree
from tarry.custom_ops.declared import BackwardContext, Declared, Formula
from tarry.custom_ops.schema import functional_results, gives_views_only, written_positions
from tarry.ir.layout import TensorType

RULES = "tarry_autograd"
"""The namespace of the rules."""


def make_formula(op: Declared) -> Formula:
    """The formula of an operator that has both functions."""
    declared = op._schema.arguments
    names = tuple(argument.name for argument in declared)
    tensors = [argument for argument in declared if "Tensor" in str(argument.type)]
    return Formula(
        op,
        op._get_impl("save_for_backward"),
        op._get_impl("backward"),
        op._output_differentiability,
        names,
        frozenset(argument.name for argument in tensors),
        frozenset(k for k, argument in enumerate(declared) if _is_tensor_list(str(argument.type))),
        written_positions(op._schema),
        _named_tuple(f"{op._opname}_args", names),
        op._autograd_function,
    )


def _is_tensor_list(kind: str) -> bool:
    return "List" in kind and "Tensor" in kind


def _named_tuple(name: str, names: Sequence[str]) -> Any:
    """A named tuple. Arguments may be called what a field may not, `_x` or `from`."""
    made: Any = namedtuple(name, names, rename=True)  # type: ignore[misc]
    for position, wanted in enumerate(names):
        if not hasattr(made, wanted):
            setattr(made, wanted, property(operator.itemgetter(position)))
    return made


def make_rule(op: Declared) -> Callable[..., Any]:
    """The kernel that is called when an argument requires a gradient."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        formula = op._formula
        if formula is not None:
            return _apply(formula, _in_order(op, args, kwargs))
        if gives_views_only(op._schema):
            return _views(op, _in_order(op, args, kwargs))
        _refuse(op)

    return rule


def _views(op: Declared, values: list[Any]) -> Any:
    """The views that an operator gives, made anew by an operator whose gradient PyTorch knows."""
    with torch._C._AutoDispatchBelowAutograd():
        result = call_with(op, values)
    bases = {
        name: value
        for argument, value in zip(op._schema.arguments, values, strict=True)
        if argument.alias_info is not None
        for name in argument.alias_info.before_set
    }

    def again(made: Any, declared: Any) -> Any:
        if isinstance(made, list | tuple):
            return [again(item, declared) for item in made]
        base = bases[next(iter(declared.alias_info.before_set))]
        if (made.dtype, made.is_conj(), made.is_neg()) != (base.dtype, base.is_conj(), base.is_neg()):
            raise RuntimeError(
                f"{op} gives a view of another dtype, or a conjugated one, which has no gradient. Call it under "
                "torch.no_grad() or on detached tensors."
            )
        return base.as_strided(made.shape, made.stride(), made.storage_offset())

    declared = op._schema.returns
    if len(declared) == 1:
        return again(result, declared[0])
    return tuple(again(made, ret) for made, ret in zip(result, declared, strict=True))


def _refuse(op: Declared) -> NoReturn:
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


def _in_order(op: Declared, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Every argument of the schema, in its order: the dispatcher leaves out those that have their default value."""
    if not kwargs and len(args) == len(op._arguments):
        return list(args)
    values = []
    for position, (name, keyword_only, default) in enumerate(op._arguments):
        if keyword_only:
            values.append(kwargs.get(name, default))
        else:
            values.append(args[position] if position < len(args) else default)
    return values


@dataclass(slots=True)
class _Call:
    """One call on its way through an autograd.Function, which takes flat arguments only: lists of tensors are spread
    out. It has no tensors, which would make cycles."""

    formula: Formula
    lengths: list[int | None] | None
    """How long each list of tensors is, None for what is none. None altogether: there are no lists."""
    kinds: list[type] = field(default_factory=list)
    """The types of the flat arguments."""
    returned: pytree.TreeSpec | None = None
    """The structure of the results; None for a single tensor."""
    made: list[tuple[torch.Size, torch.dtype, torch.device] | None] = field(default_factory=list)
    """What the differentiable results look like; None for another."""
    saved: _Saved | None = None

    def nested(self, flat: Sequence[Any]) -> Sequence[Any]:
        """Flat values by argument."""
        if self.lengths is None:
            return flat
        rest = iter(flat)
        return [next(rest) if length is None else [next(rest) for _ in range(length)] for length in self.lengths]

    def results(self, flat: Sequence[Any]) -> Any:
        """Flat results as the operator returns them."""
        return flat[0] if self.returned is None else pytree.tree_unflatten(list(flat), self.returned)


def _apply(formula: Formula, values: list[Any]) -> Any:
    flat, lengths = _spread(values, formula.lists) if formula.lists else (values, None)
    call = _Call(formula, lengths)
    if torch._C._are_functorch_transforms_active():
        from torch._functorch.utils import enable_single_level_autograd_function

        # Says to torch.func that a function that looks at none of its transforms is meant (see make_function).
        with enable_single_level_autograd_function():
            results = formula.function.apply(call, *flat)
    else:
        if formula.written:
            _check_overlap(formula, values)
        results = formula.function.apply(call, *flat)
    return _as_declared(formula, values, call.results(results))


def _as_declared(formula: Formula, values: Sequence[Any], functional: Any) -> Any:
    """What the operator returns, of its results and new contents, which are copied to the arguments."""
    if not formula.written:
        return functional
    declared: Any = formula.op._schema
    every = functional if isinstance(functional, tuple) else (functional,)
    for k, new in zip(formula.written, every[-len(formula.written) :], strict=True):
        for old, content in zip(pytree.tree_leaves(values[k]), pytree.tree_leaves(new), strict=True):
            if old is not None:
                old.copy_(content)
    written = {name: k for k in formula.written for name in declared.arguments[k].alias_info.before_set}
    fresh = iter(every)
    returned = tuple(
        next(fresh) if ret.alias_info is None else values[written[next(iter(ret.alias_info.before_set))]]
        for ret in declared.returns
    )
    return returned[0] if len(returned) == 1 else returned or None


def _clone(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def _check_overlap(formula: Formula, values: Sequence[Any]) -> None:
    """Refuse arguments that are written to and share memory with others: on copies, the kernel would do otherwise."""
    written = [(k, leaf) for k in formula.written for leaf in pytree.tree_leaves(values[k]) if leaf is not None]
    others = [(k, leaf) for k, value in enumerate(values) for leaf in pytree.tree_leaves(value)]
    for k, one in written:
        for j, other in others:
            if isinstance(other, torch.Tensor) and other is not one and _overlap(one, other):
                raise RuntimeError(
                    f"{formula.op} writes to {formula.names[k]}, which shares memory with {formula.names[j]}; with a "
                    "gradient that is not supported. Pass a clone() of one of them."
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    (first, end), (second, last) = (
        TensorType.of(tensor).at(int(tensor.storage_offset())).byte_range for tensor in (one, other)
    )
    return first < last and second < end


def _spread(values: Sequence[Any], lists: frozenset[int]) -> tuple[list[Any], list[int | None]]:
    flat: list[Any] = []
    lengths: list[int | None] = []
    for position, value in enumerate(values):
        is_spread = position in lists and value is not None
        flat.extend(value if is_spread else [value])
        lengths.append(len(value) if is_spread else None)
    return flat, lengths


def make_function(name: str) -> Any:
    """An autograd.Function of that name: it is what users see as `grad_fn`.

    The dispatcher has taken care of the transforms of torch.func when the rule is called, as for any operator. So this
    is the function that looks at none of them, which is private to torch (checked on 2.11 and 2.13).
    """
    members = {"forward": staticmethod(_forward), "backward": staticmethod(_backward), "jvp": staticmethod(_jvp)}
    return type(f"{name}_customop", (torch.autograd.function._SingleLevelFunction,), members)


def _forward(ctx: Any, call: _Call, *flat: Any) -> tuple[Any, ...]:
    formula = call.formula
    values = call.nested(flat)
    given = list(values)
    for k in formula.written:
        given[k] = _clone(values[k])
    with torch._C._AutoDispatchBelowAutograd():  # checked on torch 2.11 and 2.13
        result = call_with(formula.op, given)
    if formula.written:
        result = functional_results(formula.op._schema, given, result)
    results: tuple[Any, ...] = (result,)
    if not isinstance(result, torch.Tensor):
        leaves, call.returned = pytree.tree_flatten(result)
        results = tuple(leaves)
    call.kinds = [type(value) for value in flat]
    ctx.call = call
    saved = formula.save_for_backward.func(formula.named(*values), result)
    if formula.written:  # what is saved stays as it is
        written = [leaf for k in formula.written for leaf in pytree.tree_leaves(values[k])]
        saved = pytree.tree_map(lambda leaf: _clone(leaf) if any(leaf is one for one in written) else leaf, saved)
    _save(ctx, saved)
    constant = _not_differentiable(result, formula.output_differentiability or ())
    if constant:
        ctx.mark_non_differentiable(*constant)
    call.made = [
        (r.shape, r.dtype, r.device)
        if isinstance(r, torch.Tensor) and _is_smooth(r) and not any(r is other for other in constant)
        else None
        for r in results
    ]
    return results


def _forward_levels() -> int:
    """How many forward-mode transforms of torch.func are at work. Private to torch: checked on 2.11 and 2.13."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return sum(level.key() == torch._C._functorch.TransformType.Jvp for level in levels)


def _is_smooth(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _jvp(ctx: Any, _: Any, *tangents: Any) -> tuple[Any, ...]:
    call: _Call = ctx.call
    op = call.formula.op
    if _forward_levels() > 1:
        # The tangents of the outer level would be lost on the way through the backward function.
        raise NotImplementedError(
            f"{op}: forward-mode AD within forward-mode AD is not supported; use torch.func.hessian"
        )
    with torch.enable_grad():
        probes = [
            None if like is None else torch.zeros(like[0], dtype=like[1], device=like[2], requires_grad=True)
            for like in call.made
        ]
        needed = [isinstance(tangent, torch.Tensor) for tangent in tangents]
        found = _gradients(ctx, call, probes, needed)
        pairs = [(g, t) for g, t in zip(found, tangents, strict=True) if g is not None and isinstance(t, torch.Tensor)]
        if not all(gradient.requires_grad for gradient, _ in pairs):
            raise NotImplementedError(
                f"{op}: forward-mode AD takes a backward function that can itself be differentiated, and that at "
                f"{call.formula.backward.location} computes with something else than differentiable operators"
            )
        given = [probe for probe in probes if probe is not None]
        made = iter(
            torch.autograd.grad(
                [gradient for gradient, _ in pairs],
                given,
                [tangent for _, tangent in pairs],
                create_graph=True,
                materialize_grads=True,
            )
            if pairs
            else [torch.zeros_like(probe) for probe in given]
        )
    return tuple(None if probe is None else next(made) for probe in probes)


def call_with(op: Declared, values: Sequence[Any]) -> Any:
    """Call an operator with all its arguments, in the order of the schema."""
    if not op._has_keywords:
        return op._op(*values)
    pairs = list(zip(op._arguments, values, strict=True))
    return op._op(
        *(value for (_, keyword_only, _), value in pairs if not keyword_only),
        **{name: value for (name, keyword_only, _), value in pairs if keyword_only},
    )


@dataclass(slots=True)
class _Saved:
    """What was saved besides tensors, and how to put it together again. No structure: it was one tensor."""

    structure: pytree.TreeSpec | None = None
    is_tensor: Sequence[bool] = (True,)
    others: Sequence[Any] = ()


_ONE_TENSOR = _Saved()


def _save(ctx: Any, things: Any) -> None:
    """Keep anything for backward. Tensors go through save_for_backward, or they would make cycles and hide writes."""
    if things is None:
        return
    if isinstance(things, torch.Tensor):
        ctx.save_for_backward(things)
        ctx.save_for_forward(things)
        ctx.call.saved = _ONE_TENSOR
        return
    flat, structure = pytree.tree_flatten(things)
    is_tensor = [isinstance(thing, torch.Tensor) for thing in flat]
    tensors = [thing for thing, saved in zip(flat, is_tensor, strict=True) if saved]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    others = [thing for thing, saved in zip(flat, is_tensor, strict=True) if not saved]
    ctx.call.saved = _Saved(structure, is_tensor, others)


def _saved(ctx: Any) -> Any:
    saved: _Saved | None = ctx.call.saved
    if saved is None:
        return None
    tensors, others = iter(ctx.saved_tensors), iter(saved.others)
    if saved.structure is None:
        return next(tensors)
    flat = [next(tensors) if is_tensor else next(others) for is_tensor in saved.is_tensor]
    return pytree.tree_unflatten(flat, saved.structure)


def _not_differentiable(result: Any, differentiable: Sequence[bool]) -> list[torch.Tensor]:
    """The results that never require a gradient."""
    results = result if isinstance(result, tuple) else (result,)
    found: list[torch.Tensor] = []
    for index, (wanted, made) in enumerate(zip(differentiable, results, strict=bool(differentiable))):
        if wanted and not isinstance(made, torch.Tensor | list):
            raise RuntimeError(
                f"output_differentiability={list(differentiable)} says that result {index} is differentiable, but it "
                f"is not a Tensor: it is a {type(made).__name__}. Write False there."
            )
        if not wanted:
            found += [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    return found


def _backward(ctx: Any, *flat_grads: Any) -> tuple[Any, ...]:
    return (None, *_gradients(ctx, ctx.call, flat_grads, ctx.needs_input_grad[1:]))


def _gradients(ctx: Any, call: _Call, flat_grads: Sequence[Any], flat_needed: Sequence[bool]) -> list[Any]:
    """What the backward function gives for each flat argument."""
    formula = call.formula
    grads = call.results(flat_grads)
    needed = call.nested(flat_needed)
    context = BackwardContext(
        {n: any(need) if isinstance(need, list) else need for n, need in zip(formula.names, needed, strict=True)}
    )
    found = formula.backward.func(context, _saved(ctx), *(grads if isinstance(grads, tuple) else (grads,)))
    kinds = call.nested(call.kinds)
    _GradientCheck(formula, kinds).run(found)
    flat: list[Any] = []
    for name, kind in zip(formula.names, kinds, strict=True):
        if isinstance(kind, list):
            flat.extend(found.get(name) or [None] * len(kind))
        else:
            flat.append(found.get(name))
    return flat


class _GradientCheck:
    """Whether a backward function returned what it has to: a dict with a gradient for each tensor argument."""

    def __init__(self, formula: Formula, kinds: Sequence[Any]) -> None:
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
        expected = self.formula.tensors
        if found.keys() != expected:
            self.fail(
                f"was expected to have keys {set(expected) or '{}'} in the dict it returns, and has {set(found)}. Each "
                "argument that is a tensor or a list of tensors has a gradient there, or None; arguments of "
                "non-Tensor-like types have none."
            )
        for name, kind in zip(self.formula.names, self.kinds, strict=True):
            gradient = found.get(name)
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
