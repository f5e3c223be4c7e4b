"""Lowering to TorchScript: each node becomes a node of a torch._C.Graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from tarry import generated
from tarry.backends.base import Computation
from tarry.backends.lowering import LoweringContext, with_all_inputs
from tarry.backends.torchscript import jit, types
from tarry.backends.torchscript.jit import JitBuilder, JitGraph, JitValue
from tarry.backends.torchscript.program import Program
from tarry.backends.torchscript.writes import SCATTERS, Writes, plan_writes, writing_form
from tarry.codegen.op_table import facts
from tarry.codegen.shards import shard
from tarry.errors import Unsupported
from tarry.ir.graph import HERE, Graph, Node, Number, Value
from tarry.ir.layout import VIEW_RULES, TensorType, is_injective, memory_order
from tarry.ir.operators import draws_nothing, list_length, operator, overload

_FOREACH_NUMBERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "aten::_foreach_add.Scalar": ("aten::_foreach_add.Tensor", (1,)),
    "aten::_foreach_add_.Scalar": ("aten::_foreach_add_.Tensor", (1,)),
    "aten::_foreach_mul.Scalar": ("aten::_foreach_mul.Tensor", ()),
    "aten::_foreach_mul_.Scalar": ("aten::_foreach_mul_.Tensor", ()),
    "aten::_foreach_div.Scalar": ("aten::_foreach_div.Tensor", ()),
    "aten::_foreach_div_.Scalar": ("aten::_foreach_div_.Tensor", ()),
}
"""Operators on lists that take a number, with the one that takes a tensor, and the arguments that only that one has."""


def needs_python(graph: Graph) -> bool:
    """Whether a program for this graph has to be run by Python: for its generators, or because a kernel that is not
    PyTorch's own may be written in Python, where an interrupt could stop it half way."""
    return any(draws(node) or facts(node.op).is_custom for node in graph.nodes)


def draws(node: Node) -> bool:
    """Whether a node draws random numbers: a generator is then an input of the program."""
    return node.drawn_from is not None and not draws_nothing(node.op, node.args)


@functools.cache
def _generated_lowering(op: str) -> FunctionType | None:
    """The function that appends an ATen operator, from the modules that tarry generates for itself."""
    module = None if facts(op).is_custom else generated.module(f"torchscript_{shard(op)}")
    return None if module is None else module.LOWERINGS.get(op)


class TSLoweringContext(LoweringContext[JitValue]):
    """A TorchScript graph under construction.

    Its inputs are the parameters (`p0`, ...), then the numbers that are used (`n0`, ...; a seed is an int) and
    generators if random operators need them, in the order of `feeds`. `into` continues a graph that is there already,
    for partial lowering: `emitted` then holds values of it. Nodes are lowered in the order of the graph.
    """

    def __init__(
        self,
        graph: Graph,
        emitted: Mapping[Value, JitValue] | None = None,
        *,
        device: str = "cpu",
        into: JitGraph | None = None,
    ) -> None:
        super().__init__(graph, emitted)
        self.builder = JitBuilder(into)
        self.device = torch.device(device)
        self.feeds: list[int | torch.Generator] = []
        """What the inputs after the parameters are given: the number of an index, or a generator."""
        self.borrowed: torch.Generator | None = None
        """The device's own generator, if the program seeds it: its state has to be given back."""
        self.writes = Writes() if emitted else plan_writes(graph)
        self._position = {id(node): k for k, node in enumerate(graph.nodes)}
        self._inputs = frozenset(graph.inputs)
        self._numbers: dict[int, JitValue] = {}
        self._generators: dict[str, JitValue] = {}
        # Values that surely have the strides of their type. Others may have different ones: a kernel need not return
        # what its meta kernel promised, and within a graph that only matters to a few operators.
        self._exact: set[Value] = set(graph.inputs)
        self._node: Node | None = None  # the one that is being lowered

    # ---- the parts of a node

    def parameter(self, position: int, value: Value) -> JitValue:
        return self.builder.input(f"p{position}", types.TENSOR)

    def number(self, number: Number) -> JitValue:
        """The number as an input; one that stands for a tensor becomes that tensor, a seed a generator."""
        if number.kind == "seed":
            return self._seeded("generator", lambda: torch.Generator(self.device), number)
        made = self._number_input(number)
        if number.kind != "wrapped":
            return made
        return self.builder.one("tarry::wrapped_number", (self.builder.operand(made, types.NUMBER),))

    def constant(self, constant: Any) -> Any:
        return self.device if constant is HERE else constant

    def _number_input(self, number: Number) -> JitValue:
        if number.index not in self._numbers:
            type_ = types.INT if number.kind == "seed" else jit.NUMBER_TYPES[number.dtype]
            self._numbers[number.index] = self.builder.input(f"n{number.index}", type_)
            self.feeds.append(number.index)
        return self._numbers[number.index]

    def _seeded(self, name: str, make: Callable[[], torch.Generator], seed: Number) -> JitValue:
        """A generator that was just seeded. One serves all nodes: each seeds it anew before it draws."""
        number = self._number_input(seed)
        if name not in self._generators:
            self._generators[name] = self.builder.input(name, types.GENERATOR)
            self.feeds.append(make())
        return self.builder.one("aten::manual_seed", (self._generators[name], number), types.GENERATOR)

    def _borrow_generator(self) -> torch.Generator:
        """The device's generator, which operators draw from that take none."""
        if self.device.type == "cuda":
            torch.cuda.init()
            self.borrowed = torch.cuda.default_generators[self.device.index or 0]
        else:
            self.borrowed = torch.default_generator
        return self.borrowed

    # ---- nodes

    def lower_node(self, node: Node) -> None:
        self.begin(node)
        super().lower_node(node)

    def begin(self, node: Node) -> None:
        """Say which node is being lowered: errors name it, and its outputs give the lengths of lists."""
        self._node = node

    def emit(self, node: Node, args: tuple[Any, ...]) -> Sequence[JitValue | None]:
        if node.seed is not None and draws(node):
            self._seeded("default_generator", self._borrow_generator, node.seed)
        if operator(node.op).random:  # which element gets which number depends on strides
            args = tuple(
                self._in_strides(arg, value) if isinstance(value, Value) else arg
                for arg, value in zip(args, node.args, strict=True)
            )
        if node.op in VIEW_RULES:
            return [self._view(node, args)]
        if node.op == "aten::as_strided_scatter":
            return [self._strided_scatter(node, args)]
        position = self._position.get(id(node))
        if position is not None and position == self.writes.first:
            self._begin_writes()
        in_place = position in self.writes.nodes
        if node.op in SCATTERS and in_place:
            base, source, *window = args
            self._one("aten::copy_", self._one(SCATTERS[node.op], base, *window), source, False)
            return [base]
        if node.kept:
            return self._written(node.op, args if in_place else self._copies(node, args))
        op, form = node.op, writing_form(node.op) if in_place else None
        if form is not None:
            op, args = form.op, tuple(args[k] for k in form.args)
        if op in _FOREACH_NUMBERS and self.device.type == "cpu":
            op, args = self._foreach_tensor(op, args, node)
        return self._call(op, args) if form is None else self._written(op, args)

    def _begin_writes(self) -> None:
        """Have the program say that it begins to overwrite its inputs: nothing is computed from them again if it fails
        later (csrc/core/failure.h)."""
        positions = [self.graph.replaces[output] for output in self.writes.outputs]
        replaced = [self.emitted[self.graph.inputs[k]] for k in positions if k is not None]
        inputs = self.builder.operand(replaced, types.TENSOR_LIST)
        self.builder.node("tarry::begin_writes", (inputs,), [])

    def _foreach_tensor(self, op: str, args: tuple[Any, ...], node: Node) -> tuple[str, tuple[Any, ...]]:
        """An operator on a list and a number as one on a list and a tensor, if that is the same: the loop that runs it
        on a CPU would make that tensor, and convert it, for each element of the list."""
        dtypes = {value.type.dtype for value in (*node.operands, *node.results)}
        if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
            return op, args  # it promotes, or its kernel uses the number in more precision than the dtype has
        tensors, number = args
        # Made in two steps: a number too large for the dtype is infinite there, as it is in a call of eager PyTorch.
        exact = self._one("aten::scalar_tensor", number, torch.float64, None, torch.device("cpu"), None)
        tensor = self._one("aten::to.dtype", exact, dtypes.pop(), False, False, None)
        op, rest = _FOREACH_NUMBERS[op]
        return op, (tensors, tensor, *rest)

    def builtin(self, op: str, args: tuple[Any, ...]) -> list[JitValue | None]:
        """Append an operator that TorchScript knows, given all its arguments; returns its fresh results. Generated
        lowerings end here (tarry.ir.typed)."""
        return self._call(op, args)

    def _one(self, op: str, *args: Any) -> JitValue:
        """Append an operator with one result."""
        return self._append(op, args).output()

    def _append(self, op: str, args: Sequence[Any]) -> Any:
        lowering = _generated_lowering(op)
        if lowering is None or lowering.__code__.co_argcount != len(args) + 1:  # a malformed node raises there
            made = self._append_by_schema(op, args)
        else:
            made = lowering(self.builder, *args)
        try:
            found = jit.matched_operator(made)
        except RuntimeError as error:
            raise Unsupported(self._node, f"TorchScript does not know it: {str(error).splitlines()[0]}") from error
        if found != op:
            raise Unsupported(self._node, f"TorchScript takes it for {found}")
        written = operator(op).written
        if written:
            operands = list(made.inputs())
            for index in written:
                self.builder.keep_list(operands[index])
        return made

    def _append_by_schema(self, op: str, args: Sequence[Any]) -> Any:
        """What a generated lowering does, for an operator that has none: a custom one."""
        schema = jit.schema(overload(op))
        operands = [
            self.builder.operand(arg, argument.type) for arg, argument in zip(args, schema.arguments, strict=True)
        ]
        return self.builder.node(op.partition(".")[0], operands, [ret.type for ret in schema.returns])

    def _call(self, op: str, args: tuple[Any, ...]) -> list[JitValue | None]:
        """Append an operator; returns its fresh results."""
        described = operator(op)
        outputs = list(self._append(op, args).outputs())
        results: list[JitValue | None] = []
        for index in described.fresh:
            if described.returns[index] == "Tensor":
                results.append(outputs[index])
            else:
                length = self._list_length(op, args, index)
                results += self.builder.node("prim::ListUnpack", (outputs[index],), [types.TENSOR] * length).outputs()
        return results

    def _list_length(self, op: str, args: tuple[Any, ...], index: int) -> int:
        """How many tensors there are in a list that an operator returns."""
        assert self._node is not None
        length = list_length(op, args, len(self._node.outputs), index)
        if length is None:
            raise Unsupported(self._node, "it returns several lists of unknown lengths")
        return length

    def _written(self, op: str, args: tuple[Any, ...]) -> list[JitValue | None]:
        """Append an operator that writes; returns its fresh results, then the arguments that it has written."""
        results = self._call(op, args)
        for index in operator(op).written:
            written = args[index] if isinstance(args[index], tuple) else (args[index],)
            results.extend(item for item in written if item is not None)
        return results

    def _copies(self, node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with copies of those that the operator writes."""
        copied = list(args)
        for index in operator(node.op).written:
            arg, values = args[index], node.args[index]
            if isinstance(values, tuple):
                copied[index] = tuple(
                    self._copy(item, value) if isinstance(value, Value) else item
                    for item, value in zip(arg, values, strict=True)
                )
            elif isinstance(values, Value):
                copied[index] = self._copy(arg, values)
        return tuple(copied)

    def _copy(self, made: JitValue, value: Value) -> JitValue:
        """A copy in a buffer of its own that has the strides of the value's type."""
        sizes, strides, dtype = value.type.sizes, value.type.strides, value.type.dtype
        if value.type.is_contiguous:
            return self._one("aten::clone", made, torch.contiguous_format)
        if is_injective(sizes, strides):
            buffer = self._one("aten::empty_strided", sizes, strides, dtype, torch.strided, self.device, False)
            return self._one("aten::copy_", buffer, made, False)
        if value in self._exact:
            flat = self._one("aten::as_strided", made, (value.type.extent,), (1,), None)
            copy = self._one("aten::clone", flat, torch.contiguous_format)
            return self._one("aten::as_strided", copy, sizes, strides, 0)
        single = tuple(1 if stride == 0 else size for size, stride in zip(sizes, strides, strict=True))
        if single == sizes:
            raise Unsupported(self._node, "it needs a copy of overlapping elements whose strides are not known")
        for d in range(len(sizes)):
            if single[d] != sizes[d]:
                made = self._one("aten::slice.Tensor", made, d, 0, 1, 1)
        copy = self._copy(made, Value(value.id, TensorType(dtype, single, strides)))
        return self._one("aten::as_strided", copy, sizes, strides, 0)

    # ---- operators that depend on strides

    def _in_strides(self, made: JitValue, value: Value) -> JitValue:
        """The value in the strides of its type; a copy only if it has others."""
        if value in self._exact:
            return made
        if value.type.is_contiguous:
            return self._one("aten::contiguous", made, torch.contiguous_format)
        if not value.type.is_dense:
            return self._copy(made, value) if is_injective(value.type.sizes, value.type.strides) else made
        order = memory_order(value.type.sizes, value.type.strides)
        packed = self._one("aten::contiguous", self._one("aten::permute", made, order), torch.contiguous_format)
        return self._one("aten::permute", packed, tuple(order.index(d) for d in range(len(order))))

    def _view(self, node: Node, args: tuple[Any, ...]) -> JitValue:
        op, (source, *rest) = node.op, args
        base = node.operands[0]
        exact = base in self._exact
        if op == "aten::as_strided":
            if base not in self._inputs:  # offsets count from the start of the value's own buffer
                source = self._copy(source, base)
            exact = True
        elif op == "aten::view.dtype" and 1 in base.type.sizes:
            # Strides of dimensions of size 1 are free (that of an expanded scalar is 0), but not to this operator.
            source = self._one("aten::clone", source, torch.contiguous_format)
            exact = node.results[0].type.is_contiguous
        elif op in ("aten::view.dtype", "aten::view_as_complex") and not exact:
            source = self._one("aten::contiguous", source, torch.contiguous_format)
            exact = node.results[0].type.is_contiguous
        elif op == "aten::view" and not exact:
            op = "aten::reshape"  # a view where one exists
        elif op == "aten::view_as_real":
            source = self._one("aten::resolve_conj", source)
        if op == "aten::view.dtype":  # TorchScript refuses to know it: too like a view with one size
            op, exact = "aten::view_copy.dtype", exact and node.results[0].type.is_contiguous
        if exact:
            self._exact.update(node.results)
        return self._one(op, source, *rest)

    def _strided_scatter(self, node: Node, args: tuple[Any, ...]) -> JitValue:
        base, source, *window = args
        copy = self._copy(base, node.operands[0])
        self._one("aten::copy_", self._one("aten::as_strided", copy, *window), source, False)
        return copy

    # ---- the program

    def build(self) -> Computation:
        """The program, which returns what is not written in place."""
        in_place = self.writes.outputs
        returned = [k for k in range(len(self.results)) if k not in in_place]
        graph = self.builder.finish([self.results[k] for k in returned])
        run = Program(
            jit.Executable(graph),
            self.feeds,
            returned,
            [value.type for value in self.graph.outputs],
            self.device,
            self.borrowed,
        )
        native = None
        if not needs_python(self.graph) and not self._generators:
            results = [value.type for value in self.graph.outputs]
            native = jit.native_program(graph, self.feeds, returned, results, self.device)
        run_all = with_all_inputs(self.graph, self.device, run)
        return Computation(run_all, self.graph, in_place, lambda: str(graph), native)
