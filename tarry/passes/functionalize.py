"""Replace operators that write to their arguments by pure ones: stage 'functional'.

In a graph such operators are pure already (see ir.graph.Node), but under names that no compiler expects in a pure
graph, and with rules of their own: an in-place result keeps the dtype and the strides of what it overwrites. Here that
becomes explicit: the pure operator, then a cast and a change of layout where its result differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tarry.codegen.op_table import facts
from tarry.errors import IRError
from tarry.ir.graph import HERE, Graph, GraphBuilder, Node, Number, Value, leaves, map_leaves, users
from tarry.ir.infer import infer
from tarry.ir.layout import TensorType
from tarry.ir.operators import STRIDED_SCATTER, operator, overload
from tarry.passes.emit import Emitter
from tarry.passes.functional_forms import FunctionalForm, functional_form


def functionalize(graph: Graph) -> Graph:
    """The graph with pure operators only, except nodes marked `kept`, for which PyTorch has none."""
    if not any(operator(node.op).is_mutable for node in graph.nodes):
        return graph
    return _Functionalizer(graph).run()


class _Functionalizer:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.builder = GraphBuilder(graph)
        self.emit = Emitter(self.builder)
        self.users = users(graph)
        self.inputs = set(graph.inputs)
        self.returned = set(graph.outputs)

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self.emit.like = node
            if not operator(node.op).is_mutable:
                self.builder.copy(node)
            elif not self.rewrite(node):
                self.builder.copy(node, kept=True)
        return self.builder.finish()

    def rewrite(self, node: Node) -> bool:
        args = self.builder.resolve(node.args)
        special = _SPECIAL.get(node.op)
        results: Sequence[Value | None]
        if special is not None:
            results = special(self.emit, args, node)
        else:
            form = functional_form(node.op)
            if form is None:
                return False
            if facts(node.op).overwrites and not facts(node.op).out:
                args = self.without_old_contents(node, args)
            try:
                results = self.call(form, args, node)
            except IRError:  # no meta kernel to type it, or it says that the two differ
                return False
        old_contents = _written_args(node, args)
        fresh = len(node.outputs) - len(old_contents)
        for k, (old, new) in enumerate(zip(node.outputs, results, strict=True)):
            if old is not None:
                assert new is not None, f"{node.op} returned nothing for output {k}"
                self.builder.replace(old, self.fit(old, new, old_contents[k - fresh] if k >= fresh else None))
        return True

    def without_old_contents(self, node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a node that reads none of what it overwrites: old contents that the step has computed need
        not be, but for a failure, which programs do not handle."""

        def blank(old: Any) -> Any:
            if not isinstance(old, Value) or old in self.inputs or not old.type.is_dense:
                return self.builder.resolve(old)
            made = (old.type.sizes, old.type.strides, old.type.dtype, None, HERE, None)
            return self.builder.one("aten::empty_strided", made, old.type, node)

        written = operator(node.op).written
        return tuple(map_leaves(arg, blank) if k in written else args[k] for k, arg in enumerate(node.args))

    def call(self, form: FunctionalForm, args: tuple[Any, ...], node: Node) -> tuple[Value | None, ...]:
        described = operator(form.op)
        options = {"dtype": node.results[0].type.dtype, "device": HERE}
        given: list[Any] = [
            options.get(argument.name) if index is None else args[index]
            for index, argument in zip(form.args, described.arguments, strict=True)
        ]
        types = infer(form.op, tuple(given))
        dtype = described.index_of("dtype")
        if dtype >= 0 and given[dtype] is None and len(node.outputs) == 1:
            # An accumulation into a given dtype happens in that dtype, not in the one it would choose by itself.
            wanted = node.results[0].type.dtype
            if types[0] is not None and types[0].dtype != wanted:
                given[dtype] = wanted
                types = infer(form.op, tuple(given))
        kinds = [None if value is None else value.type for value in node.outputs]
        if _sizes(types) != _sizes(kinds):
            raise IRError(f"{form.op} has other results than {node.op}")
        if not _is_pointwise(form.op) and _dtypes(types) != _dtypes(kinds):
            raise IRError(f"{node.op} accumulates in the dtype of what it writes, {form.op} in another")
        if operator(form.op).random and not all(
            old is None or (new is not None and new.matches(old)) for old, new in zip(kinds, types, strict=True)
        ):
            raise IRError(f"{node.op} draws in the order of the strides that it fills, {form.op} in another")
        # Strides of dimensions of size 1 are free: take the wanted ones.
        types = tuple(
            old.type if old is not None and new is not None and new.matches(old.type) else new
            for old, new in zip(node.outputs, types, strict=True)
        )
        return self.builder.node(form.op, given, types, site=node.site, region=node.region, seed=node.seed)

    def fit(self, old: Value, new: Value, content: Value | None) -> Value:
        """The new value in the type of the old one. Its strides do not matter if it is only scattered somewhere."""
        new = self.emit.cast(new, old.type.dtype)
        scattered = old not in self.returned and all(
            user.op == STRIDED_SCATTER and user.args[0] != old for user in self.users[old]
        )
        if scattered:
            return new
        if content is not None and content.type != old.type:
            content = None  # an out= argument that was resized
        if content is None and not old.type.is_dense:
            content = self.emit.full(TensorType.contiguous(old.type.dtype, (old.type.extent,)), 0)
            content = self.emit.view(content, "aten::as_strided", old.type.sizes, old.type.strides, 0)
        return self.emit.relayout(new, old.type, content)


def _sizes(types: Sequence[TensorType | None]) -> list[tuple[int, ...] | None]:
    return [None if type_ is None else type_.sizes for type_ in types]


def _dtypes(types: Sequence[TensorType | None]) -> list[torch.dtype | None]:
    return [None if type_ is None else type_.dtype for type_ in types]


def _is_pointwise(op: str) -> bool:
    """Whether a result of another dtype is the same as a cast of the result: not so where many elements make one."""
    return facts(op).on_lists or torch.Tag.pointwise in overload(op).tags


def _written_args(node: Node, args: tuple[Any, ...]) -> list[Value]:
    described = operator(node.op)
    return [leaf for index in described.written for leaf in leaves(args[index]) if isinstance(leaf, Value)]


# --- operators whose pure form is simpler than the one PyTorch has: they do not read what they overwrite -------------


def _copied(emit: Emitter, target: Value, source: Any) -> Value:
    if isinstance(source, Number):
        return emit.full(target.type, source)
    return emit.cast(emit.expand(source, target.type.sizes), target.type.dtype)


def _copy(emit: Emitter, args: tuple[Any, ...], node: Node) -> list[Value]:
    return [_copied(emit, args[0], args[1])]


def _foreach_copy(emit: Emitter, args: tuple[Any, ...], node: Node) -> list[Value]:
    return [_copied(emit, target, source) for target, source in zip(args[0], args[1], strict=True)]


def _zero(emit: Emitter, args: tuple[Any, ...], node: Node) -> list[Value]:
    return [emit.full(args[0].type, _zero_of(args[0]))]


def _foreach_zero(emit: Emitter, args: tuple[Any, ...], node: Node) -> list[Value]:
    return [emit.full(target.type, _zero_of(target)) for target in args[0]]


def _zero_of(value: Value) -> bool | int | float:
    if value.type.dtype.is_floating_point or value.type.dtype.is_complex:
        return 0.0
    return 0


def _fill(emit: Emitter, args: tuple[Any, ...], node: Node) -> list[Value]:
    return [emit.full(args[0].type, args[1])]


_SPECIAL: dict[str, Callable[[Emitter, tuple[Any, ...], Node], list[Value]]] = {
    "aten::copy_": _copy,
    "aten::zero_": _zero,
    "aten::fill_.Scalar": _fill,
    "aten::fill_.Tensor": _copy,
    "aten::_foreach_copy_": _foreach_copy,
    "aten::_foreach_zero_": _foreach_zero,
}
