"""The lowering: an FX call per node, numbers and seeds taken from vectors, opaque operators in place of random ones."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tarry.backends.base import PythonNumber
from tarry.backends.fx.numbers import FORMS, aten, with_tensors
from tarry.backends.fx.opaque import has_sizes, is_masked, is_opaque, keep_mask, laid_out, opaque
from tarry.backends.lowering import LoweringContext
from tarry.codegen.op_table import facts
from tarry.errors import Unsupported
from tarry.ir.graph import HERE, Graph, Node, Number, Value
from tarry.ir.operators import list_length, operator, overload
from tarry.passes.foreach import unroll_foreach

PHASE = "tarry_phase"
"""In the meta of FX nodes ("custom", which tracing hands on): how many recomputations of activation checkpointing have
begun, if any. A compiler that moves a node before one of an earlier phase undoes the checkpointing."""
STRIDE_SENSITIVE = frozenset({"aten::as_strided", "aten::as_strided_scatter", "aten::view.dtype"})


@dataclass
class NumberVector:
    """An input of the FX graph that holds numbers of one dtype. Seeds stay on the host, where generators are seeded,
    and so do the numbers of custom operators, whose kernels are called from there."""

    dtype: torch.dtype
    device: torch.device
    on_host: bool  # even if the device is another than a CPU
    placeholder: torch.fx.Node | None = None
    indices: list[int] = field(default_factory=list)

    def fill(self, numbers: Sequence[PythonNumber]) -> torch.Tensor:
        is_cpu = self.device.type == "cpu"
        values = torch.tensor([numbers[i] for i in self.indices], dtype=self.dtype, pin_memory=not is_cpu)
        return values if is_cpu else values.to(self.device, non_blocking=True)


@dataclass
class Signature:
    """What a program takes and gives: the inputs of the IR graph, then the vectors of numbers that are used; its
    outputs but for those in `in_place`, which are copied into the inputs that they replace."""

    graph: Graph
    device: torch.device
    vectors: list[NumberVector]
    in_place: frozenset[int]

    def number_tensors(self, numbers: Sequence[PythonNumber]) -> list[torch.Tensor]:
        """The vectors of numbers for one run."""
        return [vector.fill(numbers) for vector in self.vectors]

    def arranged(self, results: Sequence[Any]) -> list[Any]:
        """Results in the places of the graph's outputs, with None for those that are not returned."""
        given = iter(results)
        return [None if k in self.in_place else next(given) for k in range(len(self.graph.outputs))]

    def example_inputs(self) -> list[torch.Tensor]:
        """Uninitialised tensors of the types of the inputs (made under a fake mode, they cost nothing)."""
        made = [
            torch.empty_strided(v.type.sizes, v.type.strides, dtype=v.type.dtype, device=self.device)
            for v in self.graph.inputs
        ]
        made.extend(torch.empty(len(v.indices), dtype=v.dtype, device=v.device) for v in self.vectors)
        return made


@dataclass
class FxProgram(Signature):
    """An FX graph with its signature."""

    module: torch.fx.GraphModule


def lower(
    graph: Graph,
    device: str | torch.device,
    *,
    in_place: bool = True,
    inductor_random: bool = False,
    hidden: frozenset[str] = frozenset(),
) -> FxProgram:
    """The FX graph of a graph. With `in_place`, outputs that replace an input are copied into it at the end. With
    `inductor_random`, dropout draws by Inductor's own generator on the device: other bits than eager's for the same
    seed, but nothing that a CUDA graph could not hold. Operators in `hidden` are made opaque, like random ones."""
    context = FxLowering(unroll_foreach(graph), torch.device(device), inductor_random, hidden)
    context.lower()
    return context.finish(in_place)


def _spread(arg: Any, length: int | None) -> Any:
    """One number where the schema has a list of a length (`int[2]`) stands for all of them. Inductor counts them."""
    return arg * length if isinstance(arg, list) and len(arg) == 1 and length else arg


class FxLowering(LoweringContext[torch.fx.Node]):
    """What each value of the IR graph has become in the FX graph."""

    def __init__(
        self,
        graph: Graph,
        device: torch.device,
        inductor_random: bool = False,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(graph)
        self._inductor_random = inductor_random
        self._hidden = hidden
        self.fx = torch.fx.Graph()
        self.device = device
        self._vectors: dict[str, NumberVector] = {}
        self._elements: dict[tuple[int, str], torch.fx.Node] = {}
        self._is_element: set[torch.fx.Node] = set()
        self._numbers_on_host = False
        self._regions: set[int] = set()  # what activation checkpointing has begun to recompute

    def lower(self, nodes: Iterable[Node] | None = None) -> FxLowering:
        for position, value in enumerate(self.graph.inputs):
            self.add_parameter(position, value)
        for name, dtype, on_host in (
            ("floats", torch.float64, False),
            ("ints", torch.int64, False),
            ("host_floats", torch.float64, True),
            ("seeds", torch.int64, True),
        ):
            device = torch.device("cpu") if on_host else self.device
            self._vectors[name] = NumberVector(dtype, device, on_host, self.fx.placeholder(name))
        super().lower(nodes)
        return self

    def parameter(self, position: int, value: Value) -> torch.fx.Node:
        return self.fx.placeholder(f"input_{position}")

    def number(self, number: Number, *, on_device: bool = False) -> torch.fx.Node:
        """A tensor of no dimensions with the number. Seeds are on the host, unless asked for on the device."""
        is_float = number.dtype == torch.float64
        if (number.kind == "seed" and not on_device) or self._numbers_on_host:
            kind = "host_floats" if is_float else "seeds"
        else:
            kind = "floats" if is_float else "ints"
        if (number.index, kind) not in self._elements:
            vector = self._vectors[kind]
            vector.indices.append(number.index)
            element = self._call(aten.select.int, vector.placeholder, 0, len(vector.indices) - 1)
            self._elements[number.index, kind] = element
            self._is_element.add(element)
        return self._elements[number.index, kind]

    def constant(self, constant: Any) -> Any:
        return self.device if constant is HERE else constant

    def lower_node(self, node: Node) -> None:
        self._numbers_on_host = facts(node.op).numbers_on_host
        if node.region > 0:
            self._regions.add(node.region)
        super().lower_node(node)

    def emit(self, node: Node, args: tuple[Any, ...]) -> Sequence[torch.fx.Node | None]:
        if self._inductor_random and node.op == "aten::native_dropout" and node.seed is not None:
            return self._dropout(node, args, self._device_mask)
        if is_masked(node, self.device) and node.op not in self._hidden:
            return self._dropout(node, args, self._eager_mask)
        if is_opaque(node) or node.op in self._hidden:
            return self._opaque(node, args)
        if node.op in FORMS and any(isinstance(arg, Number) for arg in node.args):
            return [with_tensors(self._call, node, args, self._is_element.__contains__, self.device)]
        listed = [list(arg) if isinstance(arg, tuple) else arg for arg in args]
        if node.op == "aten::cat":
            joined = [arg for arg, value in zip(listed[0], node.operands, strict=True) if 0 not in value.type.sizes]
            (result,) = node.results
            if len(joined) == 1 and result.type.is_contiguous:
                # As a cache begins. Inductor would give the strides of what is left, not those of a new tensor.
                options = {"dtype": result.type.dtype, "memory_format": torch.contiguous_format}
                return [self._call(aten._to_copy.default, *joined, **options)]
        described = operator(node.op)
        target = overload(node.op)
        listed = [_spread(arg, known.N) for arg, known in zip(listed, target._schema.arguments, strict=True)]
        if node.op in STRIDE_SENSITIVE:
            # These count elements in memory: the value must lie there as it was recorded.
            (base, *_) = node.operands
            listed[0] = self._call(laid_out(), listed[0], list(base.type.strides))
        pairs = list(zip(listed, described.arguments, strict=True))
        made = self._call(
            target,
            *(arg for arg, argument in pairs if not argument.kwarg_only),
            **{argument.name: arg for arg, argument in pairs if argument.kwarg_only},
        )
        if len(described.returns) == 1 and described.returns[0] == "Tensor":
            return [made]
        return self._unpack(made, node)

    def _dropout(
        self, node: Node, args: tuple[Any, ...], draw: Callable[[Node, float], torch.fx.Node]
    ) -> Sequence[torch.fx.Node]:
        value, p, _train = args
        mask = draw(node, p)
        kept = self._call(aten.mul.Tensor, value, mask)
        return [self._call(aten.mul.Tensor, kept, 0.0 if p == 1 else 1.0 / (1.0 - p)), mask]

    def _device_mask(self, node: Node, p: float) -> torch.fx.Node:
        assert node.seed is not None
        from torch._inductor import inductor_prims  # which registers it

        sizes = list(node.operands[0].type.sizes)
        return self._call(
            aten.gt.Scalar, self._call(inductor_prims.random, sizes, self.number(node.seed, on_device=True), "rand"), p
        )

    def _eager_mask(self, node: Node, p: float) -> torch.fx.Node:
        assert node.seed is not None
        return self._call(keep_mask(), list(node.operands[0].type.sizes), 1.0 - p, self.number(node.seed))

    def _opaque(self, node: Node, args: tuple[Any, ...]) -> Sequence[torch.fx.Node | None]:
        target, taken = opaque(node)
        given = [list(args[k]) if isinstance(args[k], tuple) else args[k] for k in taken]
        if node.drawn_from is not None:
            given.append(self.number(node.drawn_from))
        if has_sizes(node):
            given += [list(part) for value in node.results for part in (value.type.sizes, value.type.strides)]
        made = self._call(target, *given)
        if len(node.results) == 1:
            return [made if value is not None else None for value in node.outputs]
        picked = iter(range(len(node.results)))
        return [None if v is None else self._call(python_operator.getitem, made, next(picked)) for v in node.outputs]

    def _unpack(self, made: torch.fx.Node, node: Node) -> list[torch.fx.Node | None]:
        """The outputs of a node one by one: returns that are lists are flattened in the IR."""
        described = operator(node.op)
        outputs: list[torch.fx.Node | None] = []
        single = len(described.returns) == 1
        remaining = list(node.outputs)
        for index in described.fresh:
            count = 1
            if described.returns[index] != "Tensor":
                length = list_length(node.op, node.args, len(node.outputs), index)
                if length is None:
                    raise Unsupported(node, "it returns several lists of unknown lengths")
                count = length
            values, remaining = remaining[:count], remaining[count:]
            if all(value is None for value in values):  # picking nothing would leave a node without a value
                outputs.extend([None] * count)
                continue
            part = made if single else self._call(python_operator.getitem, made, index)
            for position, value in enumerate(values):
                if value is None:
                    outputs.append(None)
                elif described.returns[index] == "Tensor":
                    outputs.append(part)
                else:
                    outputs.append(self._call(python_operator.getitem, part, position))
        return outputs

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.fx.Node:
        made = self.fx.call_function(target, args, kwargs)
        if self._regions:
            made.meta["custom"] = {PHASE: len(self._regions)}
        return made

    def finish(self, in_place: bool) -> FxProgram:
        """Close the graph."""
        updated = frozenset(self.aliases) if in_place else frozenset()
        for position in sorted(updated):
            self._call(aten.copy_.default, self.parameters[self.aliases[position]], self.results[position])
        self.fx.output(tuple(result for k, result in enumerate(self.results) if k not in updated))
        for vector in self._vectors.values():
            if not vector.indices and vector.placeholder is not None:
                self.fx.erase_node(vector.placeholder)
        vectors = [vector for vector in self._vectors.values() if vector.indices]
        module = torch.fx.GraphModule({}, self.fx)
        return FxProgram(self.graph, self.device, vectors, updated, module)
