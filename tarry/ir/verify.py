"""What a legal graph is, stated once, as data.

RULES lists what must hold, in an order in which a rule may rely on those before it. `verify` runs them and stops at the
first that fails, with the node and its neighbours. Some rules only hold from a stage on: each says from which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tarry.errors import IRError
from tarry.ir.aliasing import unowned_outputs, windows
from tarry.ir.graph import Graph, Here, Node, Number, Value, leaves, producers, users
from tarry.ir.infer import infer
from tarry.ir.layout import VIEW_RULES, TensorType, view_layout
from tarry.ir.operators import HIDDEN_WRITES, STRIDED_SCATTER, STRIDED_VIEW, TARRY_OPERATORS, operator, view_of
from tarry.ir.text import arg_text, node_text, type_text

STAGES = ("recorded", "functional", "views", "optimized")
"""Stages in order: what holds at one holds at all later ones."""


@dataclass(frozen=True, slots=True)
class Problem:
    message: str
    node: Node | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """`since`: the first stage at which it holds. `thorough`: too slow for every compilation, for tests."""

    name: str
    meaning: str
    check: Callable[[Graph], Iterator[Problem]]
    since: str = "recorded"
    thorough: bool = False


RULES: list[Rule] = []


def _rule(
    name: str, since: str = "recorded", thorough: bool = False
) -> Callable[[Callable[[Graph], Iterator[Problem]]], Callable[[Graph], Iterator[Problem]]]:
    def add(check: Callable[[Graph], Iterator[Problem]]) -> Callable[[Graph], Iterator[Problem]]:
        RULES.append(Rule(name, " ".join((check.__doc__ or "").split()), check, since, thorough))
        return check

    return add


def verify(graph: Graph, stage: str = "recorded", *, thorough: bool = False) -> None:
    """Raise IRError if the graph breaks a rule of that stage."""
    reached = STAGES.index(stage)
    for rule in RULES:
        if STAGES.index(rule.since) > reached or (rule.thorough and not thorough):
            continue
        for problem in rule.check(graph):
            raise IRError(_report(graph, stage, rule, problem))


def _report(graph: Graph, stage: str, rule: Rule, problem: Problem) -> str:
    lines = [f"illegal graph at stage '{stage}': {problem.message}", f"  rule '{rule.name}': {rule.meaning}"]
    if problem.node is not None:
        node = problem.node
        made_by = producers(graph)
        near = [made_by[value] for value in node.operands if value in made_by]
        used_by = users(graph)
        after = [user for value in node.results for user in used_by.get(value, [])]
        chosen = {id(item) for item in (*near[:6], node, *after[:6])}
        for k, item in enumerate(graph.nodes):
            if id(item) in chosen:
                lines.append(f"  {'>' if item is node else ' '} node {k}: {node_text(item)}")
    return "\n".join(lines)


# --- values ----------------------------------------------------------------------------------------------------------


@_rule("defined-once")
def _(graph: Graph) -> Iterator[Problem]:
    """An id belongs to one input or to one output of one node."""
    seen: set[int] = set()
    for value in graph.inputs:
        if value.id in seen:
            yield Problem(f"input %{value.id} is defined twice")
        seen.add(value.id)
    for node in graph.nodes:
        for value in node.results:
            if value.id in seen:
                yield Problem(f"%{value.id} is defined twice", node)
            seen.add(value.id)


@_rule("defined-before-use")
def _(graph: Graph) -> Iterator[Problem]:
    """A value that a node reads, or that the graph returns, is an input or an output of an earlier node."""
    defined = {value.id: value for value in graph.inputs}
    for node in graph.nodes:
        for value in node.operands:
            if defined.get(value.id) != value:
                known = defined.get(value.id)
                detail = "is not defined yet" if known is None else f"is {type_text(known.type)} where it is defined"
                yield Problem(f"%{value.id} is read as {type_text(value.type)}, but {detail}", node)
        defined.update((value.id, value) for value in node.results)
    for value in graph.outputs:
        if defined.get(value.id) != value:
            yield Problem(f"output %{value.id} of the graph is not defined with the type {type_text(value.type)}")


@_rule("types-well-formed")
def _(graph: Graph) -> Iterator[Problem]:
    """A type has a dtype, and as many strides as sizes, none of them negative."""
    for node in (None, *graph.nodes):
        for value in graph.inputs if node is None else node.results:
            type_ = value.type
            sound = isinstance(type_.dtype, torch.dtype) and len(type_.sizes) == len(type_.strides)
            if not sound or any(number < 0 for number in (*type_.sizes, *type_.strides)):
                yield Problem(f"%{value.id} has no sound type: {type_}", node)


@_rule("numbers-declared")
def _(graph: Graph) -> Iterator[Problem]:
    """Number k of the graph has index k, and nodes use the numbers of the graph."""
    for k, number in enumerate(graph.numbers):
        if number.index != k:
            yield Problem(f"number {k} of the graph has index {number.index}")
    for node in graph.nodes:
        for leaf in (*leaves(node.args), node.seed):
            if isinstance(leaf, Number) and not (
                0 <= leaf.index < len(graph.numbers) and graph.numbers[leaf.index] == leaf
            ):
                yield Problem(f"{arg_text(leaf)} is not a number of the graph, which has {len(graph.numbers)}", node)


# --- operators -------------------------------------------------------------------------------------------------------


@_rule("operator-exists")
def _(graph: Graph) -> Iterator[Problem]:
    """An operator is PyTorch's, a registered custom one, or one of tarry's."""
    for node in graph.nodes:
        try:
            operator(node.op)
        except IRError as error:
            yield Problem(str(error), node)


@_rule("arity")
def _(graph: Graph) -> Iterator[Problem]:
    """A node has one argument per argument of the schema."""
    for node in graph.nodes:
        wanted = len(operator(node.op).arguments)
        if len(node.args) != wanted:
            yield Problem(f"{node.op} has {len(node.args)} arguments, its schema {wanted}", node)


def _is_number(arg: Any) -> bool:
    return isinstance(arg, int | float | complex) or (isinstance(arg, Number) and arg.kind != "seed")


_KINDS: dict[str, Callable[[Any], bool]] = {
    "Tensor": lambda arg: isinstance(arg, Value) or _is_number(arg),
    "number": _is_number,
    "float": lambda arg: isinstance(arg, int | float) or (isinstance(arg, Number) and arg.kind != "seed"),
    "complex": _is_number,
    "int": lambda arg: isinstance(arg, int),
    "bool": lambda arg: isinstance(arg, bool),
    "str": lambda arg: isinstance(arg, str),
    "ScalarType": lambda arg: isinstance(arg, torch.dtype),
    "Layout": lambda arg: isinstance(arg, torch.layout),
    "MemoryFormat": lambda arg: isinstance(arg, torch.memory_format),
    "Device": lambda arg: isinstance(arg, torch.device | Here),
    "Generator": lambda arg: isinstance(arg, Number) and arg.kind == "seed",
}


def _fits(arg: Any, type_: str) -> bool:
    if type_.startswith("Optional["):
        return arg is None or _fits(arg, type_[len("Optional[") : -1])
    if type_.startswith("List["):
        return isinstance(arg, tuple) and all(_fits(item, type_[len("List[") : -1]) for item in arg)
    check = _KINDS.get(type_)
    return check is None or check(arg)  # types of custom operators that the IR knows nothing about


@_rule("argument-kinds")
def _(graph: Graph) -> Iterator[Problem]:
    """An argument is what the schema wants there: a value (or a number that stands in for one) for a Tensor, a tuple
    for a list, a seed for a Generator, a number or a constant elsewhere."""
    for node in graph.nodes:
        for arg, argument in zip(node.args, operator(node.op).arguments, strict=True):
            if not _fits(arg, argument.type):
                yield Problem(f"argument {argument.name} of {node.op} is {arg_text(arg)}, not {argument.type}", node)
        if node.seed is not None and node.seed.kind != "seed":
            yield Problem(f"the seed of {node.op} is {arg_text(node.seed)}", node)


def _written(node: Node) -> list[tuple[Value, bool]]:
    """The values that a node writes, with whether it is an out= argument."""
    described = operator(node.op)
    return [
        (leaf, described.arguments[index].out)
        for index in described.written
        for leaf in leaves(node.args[index])
        if isinstance(leaf, Value)
    ]


@_rule("output-count")
def _(graph: Graph) -> Iterator[Problem]:
    """A node has one output per fresh return of the schema, then one per written argument."""
    for node in graph.nodes:
        fresh = operator(node.op).fresh_count
        written = len(_written(node))
        if fresh is None:
            if len(node.outputs) < written:
                yield Problem(f"{node.op} has {len(node.outputs)} outputs, but writes {written} arguments", node)
        elif len(node.outputs) != fresh + written:
            yield Problem(
                f"{node.op} has {len(node.outputs)} outputs, should have {fresh} fresh and {written} written ones", node
            )


@_rule("written-types")
def _(graph: Graph) -> Iterator[Problem]:
    """The new content of a written argument has that argument's type; only an out= argument may be resized."""
    for node in graph.nodes:
        written = _written(node)
        for (old, out), new in zip(written, node.outputs[len(node.outputs) - len(written) :], strict=True):
            resized = out and new is not None and new.type.dtype == old.type.dtype
            if new is None or not (new.type.matches(old.type) or resized):
                found = "nothing" if new is None else type_text(new.type)
                yield Problem(f"%{old.id} is {type_text(old.type)}, but its new content is {found}", node)


@_rule("hidden-writes")
def _(graph: Graph) -> Iterator[Problem]:
    """An operator that writes without saying so in its schema only stands where it does not: batch norm without
    training, or without running statistics."""
    for node in graph.nodes:
        honest = HIDDEN_WRITES.get(node.op)
        if honest is not None:
            described = operator(node.op)
            training = node.args[described.index_of("training")]
            if training and node.args[described.index_of("running_mean")] is not None:
                yield Problem(f"{node.op} updates running statistics in training: use {honest}", node)


# --- views -----------------------------------------------------------------------------------------------------------


@_rule("strided-types")
def _(graph: Graph) -> Iterator[Problem]:
    """The output of a tarry operator has the type its typing rule gives; what is scattered has the window's dtype and
    sizes."""
    for node in graph.nodes:
        if node.op in TARRY_OPERATORS:
            (value,) = node.results
            wanted = TARRY_OPERATORS[node.op].typing(*node.args)
            if value.type != wanted:
                yield Problem(f"%{value.id} is {type_text(value.type)}, should be {type_text(wanted)}", node)
        if node.op == STRIDED_SCATTER:
            source, window = node.args[1], view_of(node.args)
            assert isinstance(source, Value)
            if (source.type.dtype, source.type.sizes) != (window.dtype, window.sizes):
                yield Problem(f"{type_text(source.type)} is scattered to {type_text(window.type)}", node)


@_rule("strided-bounds")
def _(graph: Graph) -> Iterator[Problem]:
    """A strided view or scatter stays within the buffer of its base."""
    for node in graph.nodes:
        if node.op in (STRIDED_VIEW, STRIDED_SCATTER):
            base, window = node.args[0], view_of(node.args)
            assert isinstance(base, Value)
            if len(window.sizes) != len(window.strides) or min((*window.strides, window.offset)) < 0:
                yield Problem(f"no sound layout: {window}", node)
            elif not window.fits(base.type):
                start, end = window.byte_range
                yield Problem(f"bytes {start} to {end} of a buffer of {base.type.nbytes} bytes", node)


@_rule("view-types")
def _(graph: Graph) -> Iterator[Problem]:
    """The output of a view operator has the layout that the view gives (strides of dimensions of size 1 are free)."""
    for node in graph.nodes:
        if node.op in VIEW_RULES:
            base, (value,) = node.args[0], node.results
            assert isinstance(base, Value)
            seen = view_layout(node.op, base.type.at(), node.args[1:])
            if seen is None:
                yield Problem(f"{node.op} of {type_text(base.type)} is no view", node)
            elif not seen.type.matches(value.type):
                yield Problem(f"%{value.id} is {type_text(value.type)}, should be {type_text(seen.type)}", node)


# --- the edge of the graph -------------------------------------------------------------------------------------------


@_rule("replaces")
def _(graph: Graph) -> Iterator[Problem]:
    """`replaces` has an entry per output: None, or the index of an input of the same type, no input twice."""
    if len(graph.replaces) != len(graph.outputs):
        yield Problem(f"{len(graph.outputs)} outputs, but {len(graph.replaces)} entries in replaces")
        return
    seen: set[int] = set()
    for value, index in zip(graph.outputs, graph.replaces, strict=True):
        if index is None:
            continue
        if not 0 <= index < len(graph.inputs):
            yield Problem(f"output %{value.id} replaces input {index} of {len(graph.inputs)}")
        elif index in seen:
            yield Problem(f"two outputs replace input {index}")
        elif graph.inputs[index].type != value.type:
            yield Problem(
                f"output %{value.id}: {type_text(value.type)} replaces an input of type "
                f"{type_text(graph.inputs[index].type)}"
            )
        seen.add(index)


# --- what passes promise ---------------------------------------------------------------------------------------------


@_rule("no-mutation", since="functional")
def _(graph: Graph) -> Iterator[Problem]:
    """An operator that writes to its arguments is marked as kept: there is no pure one."""
    for node in graph.nodes:
        if operator(node.op).is_mutable and not node.kept:
            yield Problem(f"{node.op} writes to its arguments", node)


@_rule("no-strided-form", since="views")
def _(graph: Graph) -> Iterator[Problem]:
    """No tarry operator is left: every view is one of PyTorch's view operators."""
    for node in graph.nodes:
        if node.op in TARRY_OPERATORS:
            yield Problem(f"{node.op} is left", node)


@_rule("as-strided-at-start", since="views")
def _(graph: Graph) -> Iterator[Problem]:
    """The base of as_strided and as_strided_scatter lies at the start of its buffer: in PyTorch their offset counts
    from the start of the storage, here from the start of the value, and so both mean the same."""
    table = windows(graph)
    for node in graph.nodes:
        if node.op in ("aten::as_strided", "aten::as_strided_scatter"):
            base = node.args[0]
            assert isinstance(base, Value)
            if table[base][1].offset != 0:
                yield Problem(f"%{base.id} starts {table[base][1].offset} elements into %{table[base][0].id}", node)


@_rule("outputs-owned", since="optimized")
def _(graph: Graph) -> Iterator[Problem]:
    """Every output of the graph has a buffer of its own, which is no input's and no other output's: it becomes the
    content of a storage."""
    for k in unowned_outputs(graph):
        yield Problem(f"output {k}, %{graph.outputs[k].id}, shares its buffer or is a part of one")


@_rule("types-inferred", thorough=True)
def _(graph: Graph) -> Iterator[Problem]:
    """dtypes and sizes are those that PyTorch's meta kernels give."""
    for node in graph.nodes:
        if operator(node.op).is_mutable:
            continue
        try:
            types = infer(node.op, node.args)
        except IRError:
            continue  # no meta kernel
        for value, wanted in zip(node.outputs, types, strict=False):
            if value is not None and wanted is not None and not _same_shape(value.type, wanted):
                yield Problem(f"%{value.id} is {type_text(value.type)}, should be {type_text(wanted)}", node)


def _same_shape(a: TensorType, b: TensorType) -> bool:
    return a.dtype == b.dtype and a.sizes == b.sizes
