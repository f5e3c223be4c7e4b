"""Take operators on lists of tensors apart, for backends that fuse better than a list kernel does."""

from __future__ import annotations

from typing import Any

from tarry.errors import IRError
from tarry.ir.graph import Graph, GraphBuilder, Node
from tarry.ir.operators import operator

PREFIX = "aten::_foreach_"

# The operator on single tensors for each kind of second argument; `None`: no such form. Arguments are those of the list
# operator, each list replaced by its element, unless `_arguments` says otherwise.
_BINARY: dict[str, tuple[str | None, str | None]] = {  # name: (with a tensor, with a number)
    "add": ("add.Tensor", "add.Scalar"),
    "sub": ("sub.Tensor", "sub.Scalar"),
    "mul": ("mul.Tensor", "mul.Scalar"),
    "div": ("div.Tensor", "div.Scalar"),
    "clamp_max": ("clamp_max.Tensor", "clamp_max"),
    "clamp_min": ("clamp_min.Tensor", "clamp_min"),
    "maximum": ("maximum", "clamp_min"),
    "minimum": ("minimum", "clamp_max"),
    "pow": ("pow.Tensor_Tensor", "pow.Tensor_Scalar"),
    "lerp": ("lerp.Tensor", "lerp.Scalar"),
    "addcmul": (None, "addcmul"),
    "addcdiv": (None, "addcdiv"),
}
_SAME_ARGUMENTS = frozenset({"copy", "clone", "max", "mm", "zero"})


def single(op: str) -> str | None:
    """The operator on single tensors that a list operator applies to each; None if there is no such operator."""
    name, _, variant = op.removeprefix(PREFIX).partition(".")
    if name in _BINARY:
        with_tensor, with_number = _BINARY[name]
        found = {"List": with_tensor, "Tensor": with_tensor, "ScalarAndTensor": "pow.Scalar"}.get(variant, with_number)
        return None if found is None else f"aten::{found}"
    if name == "norm":
        return "aten::linalg_vector_norm"
    if variant:
        return None
    try:
        described = operator(f"aten::{name}")
    except IRError:
        return None
    alone = sum(not argument.has_default for argument in described.arguments) == 1
    return f"aten::{name}" if alone or name in _SAME_ARGUMENTS else None


def unroll_foreach(graph: Graph) -> Graph:
    """The graph with a node per tensor in place of each node on lists."""
    if not any(node.op.startswith(PREFIX) for node in graph.nodes):
        return graph
    builder = GraphBuilder(graph)
    for node in graph.nodes:
        op = single(node.op) if node.op.startswith(PREFIX) else None
        if op is None or node.kept:
            builder.copy(node)
            continue
        args = builder.resolve(node.args)
        for position, value in enumerate(node.outputs):
            assert value is not None
            builder.replace(value, builder.one(op, _arguments(node, op, args, position), value.type, node))
    return builder.finish()


def _arguments(node: Node, op: str, args: tuple[Any, ...], position: int) -> list[Any]:
    """The arguments of the single operator, for one element of the lists."""
    picked = [arg[position] if isinstance(arg, tuple) else arg for arg in args]
    if op == "aten::linalg_vector_norm":
        order, dtype = picked[1], picked[2]
        return [picked[0], order, None, False, dtype]
    wanted = operator(op).arguments
    return picked + [argument.default for argument in wanted[len(picked) :]]
