"""Recover view operators from the strided form: stage 'views'.

After this pass a graph has no tarry operators: a `strided_view` is a short chain of PyTorch's view operators (the
closed set in `ir.layout.VIEW_RULES`), and a `strided_scatter` is that chain undone, with `slice_scatter`,
`select_scatter`, `diagonal_scatter` where a step drops elements. A write that covers the whole buffer needs its old
content no more.

A read through a window of a buffer that was just written is short-cut: through the same window it is what was written,
through one that the write did not touch it reads what was there before.
"""

from __future__ import annotations

from typing import Any

from tarry.errors import IRError
from tarry.ir.graph import Graph, GraphBuilder, Node, Value
from tarry.ir.layout import Layout, disjoint, is_injective
from tarry.ir.operators import STRIDED_SCATTER, STRIDED_VIEW, view_of
from tarry.ir.text import node_text
from tarry.passes.emit import Emitter
from tarry.passes.view_plan import Step, plan_view


def recover_views(graph: Graph) -> Graph:
    """The graph with PyTorch's view and scatter operators instead of tarry's strided ones."""
    return _Recovery(graph).run()


class _Recovery:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.builder = GraphBuilder(graph)
        self.emit = Emitter(self.builder)
        self.scatters: dict[Value, Node] = {}  # of the source graph

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self.emit.like = node
            if node.op == STRIDED_VIEW:
                (view,) = node.results
                self.builder.replace(view, self.read(node, view_of(node.args)))
            elif node.op == STRIDED_SCATTER:
                (result,) = node.results
                self.scatters[result] = node
                base, source = self.builder.resolve(node.args[0]), self.builder.resolve(node.args[1])
                self.builder.replace(result, self.write(node, base, source, view_of(node.args)))
            else:
                outputs = self.builder.copy(node)
                self.emit.note(node, outputs, self.builder.resolve(node.args))
        # A chain may end in other strides of dimensions of size 1, which only show at the edge of the graph.
        self.emit.like = None
        returned = [self.emit.retype(self.builder.resolve(value), value.type) for value in self.graph.outputs]
        return self.builder.finish(returned, self.graph.replaces)

    # --- reading ---

    def read(self, node: Node, window: Layout) -> Value:
        base = node.args[0]
        assert isinstance(base, Value)
        if window.numel == 0:
            return self.emit.full(window.type, 0)
        while (scatter := self.scatters.get(base)) is not None:
            written = view_of(scatter.args)
            source = self.builder.resolve(scatter.args[1])
            if window.matches(written) and is_injective(window.sizes, window.strides):
                if source.type.matches(window.type):
                    return source
                break
            if not disjoint(window, written):
                break
            assert isinstance(scatter.args[0], Value)
            base = scatter.args[0]
        value, steps = self.plan(node, self.builder.resolve(base), window)
        return self.follow(value, steps)

    def plan(self, node: Node, base: Value, window: Layout) -> tuple[Value, tuple[Step, ...]]:
        """The chain from a base to a window on it, and the base in a form that the chain may start from."""
        steps = plan_view(base.type.at(), window)
        if steps is None:
            raise IRError(f"no view operators reinterpret {base.type} as {window}: {node_text(node)}")
        if any(step.op == "aten::as_strided" or step.result.dtype != base.type.dtype for step in steps):
            base = self.emit.at_start(base)
        return base, steps

    def follow(self, value: Value, steps: tuple[Step, ...]) -> Value:
        for step in steps:
            value = self.emit.view(value, step.op, *step.args)
        return value

    # --- writing ---

    def write(self, node: Node, base: Value, source: Value, window: Layout) -> Value:
        if window.numel == 0:
            return base
        start, steps = self.plan(node, base, window)
        # What the chain sees before each step. Only steps that drop elements need it; the rest dies as dead code.
        before = [start]
        for step in steps[:-1]:
            before.append(self.emit.view(before[-1], step.op, *step.args))
        value = source
        for old, step in reversed(list(zip(before, steps, strict=False))):
            value = self.undo(step, old, value)
        if value.type == base.type or base.type.is_dense:
            return self.emit.relayout(value, base.type)
        # Only the buffer itself has strides that leave gaps.
        whole = (base.type.sizes, base.type.strides, 0)
        return self.builder.one("aten::as_strided_scatter", (self.emit.at_start(base), value, *whole), base.type, node)

    def undo(self, step: Step, old: Value, new: Value) -> Value:
        """`old` with `new` in the place that the step shows of it."""
        emit, args = self.emit, step.args
        if step.op == "aten::permute":
            return emit.unpermute(new, args[0])
        if step.op == "aten::unsqueeze":
            return emit.view(new, "aten::squeeze.dim", args[0])
        if step.op == "aten::squeeze.dim":
            return emit.view(new, "aten::unsqueeze", args[0])
        if step.op == "aten::expand":
            return self.unexpand(old, new)
        if step.op in _SCATTERS:
            return emit.call(_SCATTERS[step.op], old, new, *args)
        if step.op in _INVERSES:
            op, inverse_args = _INVERSES[step.op], self.inverse_args(step, old)
            if not emit.can_view(new, op, *inverse_args):
                new = emit.contiguous(new)
            return emit.view(new, op, *inverse_args)
        raise AssertionError(f"{step.op} has no inverse")

    def unexpand(self, old: Value, new: Value) -> Value:
        """One of the elements that share a place: only an operator that writes the same everywhere (`fill_`) may write
        through an expanded tensor, so any will do."""
        for _ in range(new.type.rank - old.type.rank):
            new = self.emit.view(new, "aten::select.int", 0, 0)
        for dim, size in enumerate(old.type.sizes):
            if new.type.sizes[dim] != size:
                new = self.emit.view(new, "aten::slice.Tensor", dim, 0, 1, 1)
        return new

    def inverse_args(self, step: Step, old: Value) -> tuple[Any, ...]:
        if step.op == "aten::view":
            return (old.type.sizes,)
        return (old.type.dtype,) if step.op == "aten::view.dtype" else ()


_SCATTERS = {
    "aten::slice.Tensor": "aten::slice_scatter",
    "aten::select.int": "aten::select_scatter",
    "aten::diagonal": "aten::diagonal_scatter",
    "aten::as_strided": "aten::as_strided_scatter",
}
_INVERSES = {
    "aten::view": "aten::view",
    "aten::view.dtype": "aten::view.dtype",
    "aten::view_as_real": "aten::view_as_complex",
    "aten::view_as_complex": "aten::view_as_real",
}
