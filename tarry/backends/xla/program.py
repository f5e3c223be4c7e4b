"""A graph to one compiled XLA program, and the program's runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tarry.backends.base import Computation, PythonNumber
from tarry.backends.lowering import LoweringContext
from tarry.backends.xla import attention, indexing, linear, networks, pointwise, reductions, shapes  # noqa: F401 - tables
from tarry.backends.xla.data import Exchange, wide_types
from tarry.backends.xla.draws import DRAWN, Draw, drawn_values
from tarry.backends.xla.dtypes import JAX_DTYPES
from tarry.backends.xla.table import LOWERINGS, Array, Call, cast
from tarry.errors import BackendError, Unsupported
from tarry.ir.graph import Graph, Node, Number, Value, leaves
from tarry.ir.layout import TensorType, contiguous_strides, memory_order
from tarry.ir.text import node_text


class _Lowering(LoweringContext[Array]):
    """Walks a graph while JAX traces it."""

    def __init__(self, graph: Graph, given: dict[Value, Array], numbers: dict[int, Array]) -> None:
        whole = {
            value: given[value]
            for node in graph.nodes
            if node.op in DRAWN and DRAWN[node.op] is None
            for value in drawn_values(node)
        }
        super().__init__(graph, whole | {value: given.get(value) for value in graph.inputs})
        self._given = given
        self._numbers = numbers
        self.checks: list[Array] = []

    def number(self, number: Number) -> Any:
        return self._numbers.get(number.index)  # None: a seed, which is not for programs

    def emit(self, node: Node, args: tuple[Any, ...]) -> Sequence[Array | None]:
        drawn = tuple(self._given[value] for value in drawn_values(node)) if node.op in DRAWN else ()
        call = Call(node, drawn, self.checks)
        try:
            made = LOWERINGS[node.op].function(call, *args)
            results = made if isinstance(made, tuple | list) else (made,)
            return [
                None if value is None else _typed(result, value)
                for result, value in zip(results, node.outputs, strict=True)
            ]
        except Exception as error:
            reason = f"its lowering failed: {type(error).__name__}: {error}\n{node_text(node)}"
            raise Unsupported(node, reason) from error


def _typed(result: Array, value: Value) -> Array:
    """A result in the dtype that was recorded; sizes have to be right."""
    array = cast(result, JAX_DTYPES[value.type.dtype])
    if array.shape != value.type.sizes:
        raise BackendError(f"it gave the shape {array.shape} instead of {value.type.sizes}")
    return array


@dataclass(frozen=True)
class _Crossing:
    """How a tensor crosses between PyTorch, where dimensions lie in memory in any order, and JAX, which has but one.

    `order` are the dimensions as they lie in memory, slowest first: the array has them in that order, and the program
    puts them in the tensor's. None: they are in their order already. `sizes`, `strides`: those of the array. `plain`:
    so are the tensor's. `dense`: the tensor has neither gaps nor repeats, so that no copy is needed.
    """

    order: tuple[int, ...] | None
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    plain: bool
    dense: bool
    key: tuple[torch.dtype, tuple[int, ...]]

    @staticmethod
    def of(type_: TensorType) -> _Crossing:
        order = None if type_.is_contiguous or not type_.is_dense else memory_order(type_.sizes, type_.strides)
        sizes = type_.sizes if order is None else tuple(type_.sizes[d] for d in order)
        # A dimension of size 1 may come with any stride, which JAX takes for another order.
        plain = order is None and type_.is_contiguous and 1 not in type_.sizes
        return _Crossing(order, sizes, contiguous_strides(sizes), plain, type_.is_dense, (type_.dtype, sizes))

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as an array can have it."""
        if self.plain:
            return tensor
        return tensor.as_strided(self.sizes, self.strides) if self.dense else tensor.contiguous()

    def inside(self, array: Array) -> Array:
        """In the program: the array that came in, as the tensor it stands for."""
        return array if self.order is None else array.transpose(np.argsort(self.order))

    def leave(self, array: Array) -> Array:
        """In the program: a result, as it has to lie in memory."""
        return array if self.order is None else array.transpose(self.order)


class Program:
    """A graph as XLA compiled it. Numbers go in as one array for each kind, random draws as inputs of their own."""

    def __init__(self, graph: Graph, exchange: Exchange, real_device: torch.device) -> None:
        self.graph = graph
        self._exchange = exchange
        self._real_device = real_device
        self._draws = [Draw(node, real_device) for node in graph.nodes if node.op in DRAWN]
        self._drawn = [value for draw in self._draws for value in drawn_values(draw.node)]
        self._numbers = _numbers_by_dtype(graph)
        read = {value for node in graph.nodes for value in node.operands} | set(graph.outputs)
        self._read = [k for k, value in enumerate(graph.inputs) if value in read]  # others may not be there at all
        self._taken = (*(graph.inputs[k] for k in self._read), *self._drawn)
        self._enter = [_Crossing.of(value.type) for value in self._taken]
        self._leave = [_Crossing.of(value.type) for value in graph.outputs]
        self._restride = [
            None if crossing.order is None else (value.type.sizes, value.type.strides)
            for crossing, value in zip(self._leave, graph.outputs, strict=True)
        ]
        self._keys = [crossing.key for crossing in self._leave]
        self._checked = False
        with wide_types():
            self._jitted = jax.jit(self._trace, keep_unused=True)
            self._compiled = self._jitted.lower(*self._arguments()).compile()

    def _arguments(self) -> list[Any]:
        """What the program takes, for the compiler: a type for each argument."""
        place = jax.sharding.SingleDeviceSharding(self._exchange.device)
        types = [
            (crossing.sizes, JAX_DTYPES[value.type.dtype])
            for crossing, value in zip(self._enter, self._taken, strict=True)
        ]
        types += [((len(indices),), JAX_DTYPES[dtype]) for dtype, indices in self._numbers.items()]
        return [jax.ShapeDtypeStruct(sizes, dtype, sharding=place) for sizes, dtype in types]

    def _trace(self, *arguments: Array) -> list[Array]:
        count = len(self._taken)
        given = {
            value: crossing.inside(array)
            for value, crossing, array in zip(self._taken, self._enter, arguments[:count], strict=True)
        }
        numbers = {
            index: array[k]
            for indices, array in zip(self._numbers.values(), arguments[count:], strict=True)
            for k, index in enumerate(indices)
        }
        lowering = _Lowering(self.graph, given, numbers)
        lowering.lower()
        results = [crossing.leave(array) for crossing, array in zip(self._leave, lowering.results, strict=True)]
        self._checked = bool(lowering.checks)
        return [*results, jnp.all(jnp.stack(lowering.checks))] if self._checked else results

    def text(self) -> str:
        """The program in StableHLO, as XLA gets it."""
        with wide_types():
            return str(self._jitted.lower(*self._arguments()).as_text())

    def __call__(self, inputs: list[torch.Tensor], numbers: list[PythonNumber]) -> list[torch.Tensor]:
        tensors = inputs if len(self._read) == len(inputs) else [inputs[k] for k in self._read]
        if self._draws:
            tensors = [*tensors, *(tensor for draw in self._draws for tensor in draw(numbers))]
        with wide_types():
            results = self._compiled(*self._arrays(tensors, numbers))
        if self._checked and not results.pop():
            raise IndexError("an index is out of range, or a whole number was divided by zero")
        to_tensor = self._exchange.to_tensor
        return [
            to_tensor(array, key) if layout is None else to_tensor(array, key).as_strided(*layout)
            for array, key, layout in zip(results, self._keys, self._restride, strict=True)
        ]

    def _arrays(self, tensors: list[torch.Tensor], numbers: list[PythonNumber]) -> list[Array]:
        exchange = self._exchange
        to_array = exchange.to_array
        arrays = [
            to_array(tensor if crossing.plain else crossing.enter(tensor), crossing.key)
            for tensor, crossing in zip(tensors, self._enter, strict=True)
        ]
        if exchange.has_streams and tensors:
            # An array of an earlier step does not know what PyTorch has written to its memory since; a new one does.
            arrays[0] = exchange.imported(self._enter[0].enter(tensors[0]))
        for dtype, indices in self._numbers.items():
            values = torch.tensor([numbers[index] for index in indices], dtype=dtype, device=self._real_device)
            arrays.append(exchange.imported(values))
        return arrays

    def computation(self) -> Computation:
        return Computation(self, self.graph, text=self.text)


def _numbers_by_dtype(graph: Graph) -> dict[torch.dtype, list[int]]:
    """The numbers that the graph uses, seeds apart, by dtype."""
    used = sorted(
        {
            (leaf.index, leaf.dtype)
            for node in graph.nodes
            for leaf in leaves(node.args)
            if isinstance(leaf, Number) and leaf.kind != "seed"
        },
        key=lambda pair: pair[0],
    )
    found: dict[torch.dtype, list[int]] = {}
    for index, dtype in used:
        found.setdefault(dtype, []).append(index)
    return found
