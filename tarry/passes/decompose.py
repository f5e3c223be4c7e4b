"""Replace operators that a backend does not know by simpler ones that it may know."""

from __future__ import annotations

import operator as python_operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tarry.ir.graph import HERE, Graph, GraphBuilder, Node, Number, Value, leaves, map_leaves, typed
from tarry.ir.layout import TensorType
from tarry.ir.operators import STRIDED_VIEW, operator
from tarry.ir.text import type_text
from tarry.passes.dead_code import eliminate_dead_code
from tarry.passes.emit import Emitter
from tarry.passes.own_outputs import own_outputs
from tarry.passes.views import recover_views

# torch's tracer is not public in all its parts: checked on 2.11 and 2.13.

Table = Mapping[str, Callable[..., Any]]


def named(table: Mapping[Any, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """A table of decompositions by the operators' names. Tables of PyTorch's (`torch._decomp.core_aten_decompositions`)
    have the operators themselves for keys."""
    return {key if isinstance(key, str) else _name(key): function for key, function in table.items()}


def _name(overload: Any) -> str:
    schema = overload._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def is_decomposed(node: Node, table: Table, writing: bool = False) -> bool:
    """Whether a node that is not supported is one for the table. What writes has no pure counterpart there, unless the
    table is one of `writing` operators, too. What draws from a seed stays whole, for its parts would draw other
    numbers; unless they draw none (attention without dropout)."""
    if node.op not in table or (node.kept and not writing):
        return False
    if node.drawn_from is None:
        return True
    return not isinstance(_traced(_recorded(node), table[node.op], ()), str)


def _recorded(node: Node) -> Node:
    """A node with its numbers as they were recorded; seeds are left out."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Number):
            return None if leaf.kind == "seed" else leaf.value
        return leaf

    return replace(node, args=map_leaves(node.args, value))


def lower(graph: Graph, lowerings: Table) -> Graph:
    """The graph with every operator that has a lowering replaced by it: as `decompose`, but what writes counts, too.
    The lowering of such an operator gives its results, then the new contents, as its node does."""
    return decompose(graph, lowerings, lambda node: node.op not in lowerings, writing=True)


def decompose(graph: Graph, table: Table, supports: Callable[[Node], bool], writing: bool = False) -> Graph:
    """The graph with every node that is not supported and whose operator the table has replaced by what the table's
    function does, in turn decomposed. A function that cannot be used leaves its node as it is, with a warning.

    Numbers of such nodes have to be constants by now (see `specialize`): the functions look at them.
    """
    if not any(is_decomposed(node, table, writing) and not supports(node) for node in graph.nodes):
        return graph
    return own_outputs(eliminate_dead_code(recover_views(_Decomposer(graph, table, supports, writing).run())))


class _Decomposer:
    def __init__(self, graph: Graph, table: Table, supports: Callable[[Node], bool], writing: bool) -> None:
        self.graph = graph
        self.table = table
        self.supports = supports
        self.writing = writing
        self.builder = GraphBuilder(graph)
        self.emit = Emitter(self.builder)

    def run(self) -> Graph:
        read = {value for node in self.graph.nodes for value in node.operands} | set(self.graph.outputs)
        for node in self.graph.nodes:
            here = replace(node, args=self.builder.resolve(node.args))
            wanted = [value is not None and value in read for value in node.outputs]
            for old, new in zip(node.outputs, self.append(here, wanted, frozenset()), strict=True):
                if old is not None and new is not None:
                    self.builder.replace(old, new)
        return self.builder.finish()

    def append(self, node: Node, wanted: Sequence[bool], within: frozenset[str]) -> Sequence[Value | None]:
        """Append a node, or what it is made of. Its arguments are values of the new graph, its outputs only types. An
        operator `within` whose decomposition it stands stays as it is: it would never end."""
        trace = None
        is_pure = self.writing or not node.kept
        if node.op in self.table and node.op not in within and is_pure and not self.supports(node):
            trace = self.trace(node, wanted)
        if trace is None:
            types = [None if value is None else value.type for value in node.outputs]
            return self.builder.node(
                node.op, node.args, types, site=node.site, region=node.region, kept=node.kept, seed=node.seed
            )
        return self.splice(node, trace, within | {node.op})

    def trace(self, node: Node, wanted: Sequence[bool]) -> _Trace | None:
        """What the decomposition does with these arguments. None if it cannot be used."""
        if any(isinstance(leaf, Number) and leaf.kind != "seed" for leaf in leaves(node.args)):
            return None  # a number that may change
        traced = _traced(_recorded(node), self.table[node.op], wanted)
        if not isinstance(traced, str):
            return traced
        if node.drawn_from is None:
            warnings.warn(f"tarry: the decomposition of {node.op} is not used: {traced}", stacklevel=2)
        return None

    def splice(self, node: Node, trace: _Trace, within: frozenset[str]) -> list[Value | None]:
        """Append the traced operators in place of the node."""
        self.emit.like = node
        known: dict[Any, Any] = dict(zip(trace.operands, node.operands, strict=True))
        for step in trace.steps:
            if step.op == "get_attr":
                known[step] = self.emit.full(TensorType.of(step.meta["val"]), trace.constants[step])
            elif step.target is python_operator.getitem:
                known[step] = known[step.args[0]][step.args[1]]
            elif step.target in _ALIASES:
                known[step] = known[step.args[0]]
            elif _is_view(step.target):
                known[step] = self.view(node, step, known)
            else:
                known[step] = self.call(node, step, known, within)
                self.emit.like = node
        returned: list[Value | None] = []
        for value, made in zip(node.outputs, trace.returned, strict=True):
            returned.append(None if value is None or made is None else self.relayout(known[made], value.type))
        return returned

    def call(self, node: Node, step: torch.fx.Node, known: Mapping[Any, Any], within: frozenset[str]) -> Any:
        args = []
        for position, argument in enumerate(step.target._schema.arguments):  # type: ignore[union-attr]
            if position < len(step.args):
                given: Any = step.args[position]
            else:
                given = step.kwargs.get(argument.name, argument.default_value)
            args.append(_argument(given, known))
        made = step.meta["val"]
        many = isinstance(made, tuple | list)
        outputs = tuple(
            None if item is None else Value(-1 - k, TensorType.of(item))
            for k, item in enumerate(made if many else (made,))
        )
        part = Node(_name(step.target), tuple(args), outputs, node.site, node.region)
        made_of = self.append(part, [True] * len(outputs), within)
        return made_of if many else made_of[0]

    def view(self, node: Node, step: torch.fx.Node, known: Mapping[Any, Any]) -> Any:
        """A view operator in the strided form, from which the operators that a graph may have are recovered."""
        base, made = step.args[0], step.meta["val"]
        assert isinstance(base, torch.fx.Node)
        start = _start(base.meta["val"])

        def window(item: torch.Tensor) -> Value:
            type_ = TensorType.of(item)
            offset, rest = divmod(_start(item) - start, item.dtype.itemsize)
            assert rest == 0
            value: Value = known[base]
            if offset == 0 and type_ == value.type:
                return value
            args = (value, type_.dtype, type_.sizes, type_.strides, offset)
            return self.builder.one(STRIDED_VIEW, args, type_, node)

        return [window(item) for item in made] if isinstance(made, tuple | list) else window(made)

    def relayout(self, value: Value, want: TensorType) -> Value:
        if value.type.matches(want):
            return value
        if want.is_dense:
            return self.emit.relayout(value, want)
        return self.builder.one("aten::clone", (value, None), want, self.emit.like)


class _Unusable(Exception):  # noqa: N818 - it ends an attempt, and is no error
    """Why a decomposition cannot take the place of its operator."""


@dataclass(frozen=True)
class _Trace:
    """A decomposition as flat FX nodes. `constants`: the numbers that tensors made by `torch.tensor(number)` hold."""

    operands: list[torch.fx.Node]
    steps: list[torch.fx.Node]
    returned: list[Any]
    constants: dict[torch.fx.Node, bool | int | float | complex]


_ALIASES = frozenset(
    {torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default, torch.ops.aten.alias.default}
)


_traces: OrderedDict[Any, _Trace | str] = OrderedDict()
_MAX_TRACES = 1024


def _traced(node: Node, function: Callable[..., Any], wanted: Sequence[bool]) -> _Trace | str:
    """What a decomposition does with arguments of these types and values, or why it cannot be used: its results must be
    those of the node, as far as they are wanted. Models repeat themselves, so it is kept."""
    args = map_leaves(node.args, lambda leaf: leaf.type if isinstance(leaf, Value) else leaf)
    types = [None if value is None else value.type for value in node.outputs]
    results = tuple(type_ if want else None for type_, want in zip(types, wanted, strict=False))
    key = (function, node.op, typed(args), results, torch.get_default_dtype())
    found = _traces.get(key)
    if found is None:
        try:
            found = _checked(results, _trace(node, function))
        except _Unusable as why:
            found = str(why)
        _traces[key] = found
        if len(_traces) > _MAX_TRACES:
            _traces.popitem(last=False)
    return found


def _trace(node: Node, function: Callable[..., Any]) -> torch.fx.GraphModule:
    described = operator(node.op)
    keyword = {argument.name for argument in described.arguments if argument.kwarg_only}

    def call(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
        given = iter(tensors)

        def concrete(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return next(given)
            return torch.device("cpu") if leaf is HERE else leaf

        args = [list(arg) if isinstance(arg, tuple) else arg for arg in map_leaves(node.args, concrete)]
        pairs = list(zip(described.arguments, args, strict=True))
        result = function(
            *(arg for argument, arg in pairs if argument.name not in keyword),
            **{argument.name: arg for argument, arg in pairs if argument.name in keyword},
        )
        parts = result if isinstance(result, tuple | list) else (result,)
        return [item for part in parts for item in (part if isinstance(part, tuple | list) else (part,))]

    with FakeTensorMode(allow_non_fake_inputs=True):
        operands = [
            torch.empty_strided(value.type.sizes, value.type.strides, dtype=value.type.dtype) for value in node.operands
        ]
        try:
            return make_fx(torch.func.functionalize(call))(*operands)
        except Exception as error:  # whatever it stumbles over, the operator itself is still there
            raise _Unusable(f"it raised {type(error).__name__}: {error}") from error


def _checked(results: Sequence[TensorType | None], traced: torch.fx.GraphModule) -> _Trace:
    """The trace, if its operators can stand in a graph and its results are the right ones (None: it is unused)."""
    steps = [step for step in traced.graph.nodes if step.op in ("call_function", "get_attr")]
    constants = {}
    for step in steps:
        if step.op == "get_attr":
            tensor = getattr(traced, str(step.target))
            constants[step] = _number(tensor)
            step.meta["val"] = tensor
        elif step.target is not python_operator.getitem:
            if not isinstance(step.target, torch._ops.OpOverload):
                raise _Unusable(f"it calls {step.target}, which is no operator")
            described = operator(_name(step.target))
            if described.is_mutable or described.random:
                does = "writes to its arguments" if described.is_mutable else "draws random numbers without a seed"
                raise _Unusable(f"it calls {described.name}, which {does}")
            made = step.meta["val"]
            for item in made if isinstance(made, tuple | list) else (made,):
                if isinstance(item, torch.Tensor) and (item.is_conj() or item.is_neg()):
                    raise _Unusable(f"{described.name} gives a lazily conjugated or negated tensor")
                if item is not None and not isinstance(item, torch.Tensor):
                    raise _Unusable(f"{described.name} gives a {type(item).__name__}, not a tensor")
    (output,) = [step for step in traced.graph.nodes if step.op == "output"]
    (returned,) = output.args
    if results:
        given = [None if made is None else TensorType.of(made.meta["val"]) for made in returned]
        same = len(given) == len(results) and all(
            want is None or (made is not None and (made.dtype, made.sizes) == (want.dtype, want.sizes))
            for made, want in zip(given, results, strict=True)
        )
        if not same:
            raise _Unusable(f"it gives {_types(given)} instead of {_types(results)}")
        returned = [None if want is None else made for made, want in zip(returned, results, strict=True)]
    operands = [step for step in traced.graph.nodes if step.op == "placeholder"]
    return _Trace(operands, steps, list(returned), constants)


def _number(tensor: torch.Tensor) -> bool | int | float | complex:
    constant = getattr(tensor, "constant", None)  # what a fake tensor was made from
    tensor = tensor if constant is None else constant
    if tensor.dim() != 0:
        raise _Unusable(f"it holds a constant of shape {tuple(tensor.shape)}; only numbers can stand in a graph")
    number: bool | int | float | complex = tensor.item()
    return number


def _types(types: Sequence[TensorType | None]) -> str:
    return ", ".join("nothing" if type_ is None else type_text(type_) for type_ in types)


def _is_view(target: Any) -> bool:
    """Whether an operator's results are windows on its first argument."""
    return any(ret.alias_info is not None and not ret.alias_info.is_write for ret in target._schema.returns)


def _start(tensor: torch.Tensor) -> int:
    """Where a tensor starts in its buffer, in bytes."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def _argument(given: Any, known: Mapping[Any, Any]) -> Any:
    if isinstance(given, torch.fx.Node):
        return known[given]
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(_argument(item, known) for item in given)
    return HERE if isinstance(given, torch.device) and given.type == "cpu" else given
