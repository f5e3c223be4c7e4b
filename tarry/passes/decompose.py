"""Replace operators that a backend does not know by simpler ones that it may know."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tarry.errors import IRError
from tarry.ir.graph import HERE, Arg, Graph, GraphBuilder, Node, Number, Value, leaves, map_leaves
from tarry.ir.layout import TensorType
from tarry.ir.operators import operator, overload

# torch's tracer is not public in all its parts: checked on 2.11 and 2.13.


def decompose(graph: Graph, table: Mapping[str, Callable[..., Any]], supports: Callable[[Node], bool]) -> Graph:
    """The graph with every node that is not supported and whose operator the table has replaced by what the table's
    function does, in turn decomposed. A function that cannot be traced leaves its node as it is."""
    wanted = [node for node in graph.nodes if node.op in table and node.seed is None and not supports(node)]
    if not wanted:
        return graph
    chosen = {id(node) for node in wanted}
    inner = {overload(op): function for op, function in table.items() if _exists(op)}
    builder = GraphBuilder(graph)
    for node in graph.nodes:
        traced = _trace(node, table[node.op], inner) if id(node) in chosen else None
        if traced is None or not _splice(builder, node, traced):
            builder.copy(node)
    return builder.finish()


def _exists(op: str) -> bool:
    try:
        overload(op)
    except (IRError, AttributeError, RuntimeError):
        return False
    return True


def _trace(
    node: Node, function: Callable[..., Any], inner: Mapping[Any, Callable[..., Any]]
) -> torch.fx.GraphModule | None:
    """What the function does with the node's operands, as a flat graph; its placeholders are the operands in order."""
    if any(isinstance(leaf, Number) for leaf in leaves(node.args)):
        return None  # it would become a constant
    described = operator(node.op)
    with FakeTensorMode(allow_non_fake_inputs=True):
        operands = [
            torch.empty_strided(value.type.sizes, value.type.strides, dtype=value.type.dtype)
            for value in node.operands
        ]

        def call(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
            given = iter(tensors)
            args = map_leaves(
                node.args,
                lambda leaf: next(given)
                if isinstance(leaf, Value)
                else torch.device("cpu")
                if leaf is HERE
                else leaf,
            )
            listed = [list(arg) if isinstance(arg, tuple) else arg for arg in args]
            pairs = list(zip(listed, described.arguments, strict=True))
            result = function(
                *(arg for arg, argument in pairs if not argument.kwarg_only),
                **{argument.name: arg for arg, argument in pairs if argument.kwarg_only},
            )
            parts = result if isinstance(result, tuple | list) else (result,)
            return [item for part in parts for item in (part if isinstance(part, tuple | list) else (part,))]

        try:
            return make_fx(torch.func.functionalize(call), decomposition_table=dict(inner))(*operands)
        except Exception:  # whatever a decomposition stumbles over, the operator itself is still there
            return None


def _splice(builder: GraphBuilder, node: Node, traced: torch.fx.GraphModule) -> bool:
    """Append the traced operators in place of the node; False, and nothing appended, if they cannot be expressed."""
    steps = [step for step in traced.graph.nodes if step.op == "call_function"]
    if any(step.op == "get_attr" for step in traced.graph.nodes):
        return False
    for step in steps:
        if step.target is python_operator.getitem:
            continue
        if not isinstance(step.target, torch._ops.OpOverload) or step.target._schema.is_mutable:
            return False
    (output,) = [step for step in traced.graph.nodes if step.op == "output"]
    (returned,) = output.args
    if len(returned) != len(node.outputs):
        return False
    if any((made is None) != (value is None) for made, value in zip(returned, node.outputs, strict=True)):
        return False
    known: dict[Any, Any] = {}
    placeholders = [step for step in traced.graph.nodes if step.op == "placeholder"]
    known.update(zip(placeholders, (builder.resolve(value) for value in node.operands), strict=True))
    for step in steps:
        if step.target is python_operator.getitem:
            known[step] = known[step.args[0]][step.args[1]]
        else:
            known[step] = _append(builder, node, step, known)
    for value, made in zip(node.outputs, returned, strict=True):
        if value is None:
            continue
        result = known[made]
        if isinstance(result, tuple):
            (result,) = result
        if not result.type.matches(value.type):
            if (result.type.dtype, result.type.sizes) != (value.type.dtype, value.type.sizes):
                raise IRError(f"the decomposition of {node.op} gives {result.type} instead of {value.type}")
            result = builder.one("aten::clone", (result, None), value.type, node)
        builder.replace(value, result)
    return True


def _append(builder: GraphBuilder, node: Node, step: torch.fx.Node, known: Mapping[Any, Any]) -> Any:
    schema = step.target._schema  # type: ignore[union-attr]
    args: list[Arg] = []
    for position, argument in enumerate(schema.arguments):
        if position < len(step.args):
            given: Any = step.args[position]
        elif argument.name in step.kwargs:
            given = step.kwargs[argument.name]
        else:
            given = argument.default_value
        args.append(_argument(given, known))
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    value = step.meta["val"]
    many = isinstance(value, tuple | list)
    types = [TensorType.of(item) if item is not None else None for item in (value if many else (value,))]
    outputs = builder.node(name, args, types, site=node.site, region=node.region)
    return outputs if many else outputs[0]


def _argument(given: Any, known: Mapping[Any, Any]) -> Any:
    if isinstance(given, torch.fx.Node):
        return known[given]
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(_argument(item, known) for item in given)
    return HERE if isinstance(given, torch.device) and given.type == "cpu" else given
