"""What a graph means, by running it: slow, on the CPU, one operator at a time, nothing clever.

This is the judge of the passes: a pass is right if the graph before and the graph after give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from tarry.errors import IRError
from tarry.ir.graph import HERE, Graph, Node, Number, Value, map_leaves
from tarry.ir.infer import call, fresh_results
from tarry.ir.layout import Layout, TensorType, extent, is_injective, same_addresses
from tarry.ir.operators import STRIDED_SCATTER, STRIDED_VIEW, operator, view_of
from tarry.ir.text import node_text, type_text


def evaluate(
    graph: Graph, inputs: Sequence[torch.Tensor | None], numbers: Sequence[int | float | complex] | None = None
) -> list[torch.Tensor]:
    """The outputs of the graph for these inputs (of the types the graph says; None for one that no node reads) and
    numbers (default: the recorded)."""
    if len(inputs) != len(graph.inputs):
        raise IRError(f"evaluate: the graph has {len(graph.inputs)} inputs, {len(inputs)} were given")
    if numbers is None:
        numbers = [number.value for number in graph.numbers]
    environment: dict[Value, torch.Tensor] = {}
    cpu = torch.device("cpu")
    for value, tensor in zip(graph.inputs, inputs, strict=True):
        if tensor is None:
            continue
        if not TensorType.of(tensor).matches(value.type):
            raise IRError(
                f"evaluate: input %{value.id} is {type_text(TensorType.of(tensor))}, not {type_text(value.type)}"
            )
        environment[value] = tensor
    for node in graph.nodes:
        run_node(node, environment, numbers, cpu)
    return [environment[value] for value in graph.outputs]


def run_node(
    node: Node,
    environment: dict[Value, torch.Tensor],
    numbers: Sequence[int | float | complex],
    device: torch.device,
    spare: Container[Value] = (),
) -> None:
    """Run one node: the environment has its operands, and gets its results. What it writes it copies first, but for
    operands that are `spare`: nothing else looks at their buffers."""
    for value, result in zip(node.outputs, _run(node, environment, numbers, device, spare), strict=True):
        if value is not None:
            environment[value] = _as_typed(result, value, node)


def _run(
    node: Node,
    environment: dict[Value, torch.Tensor],
    numbers: Sequence[int | float | complex],
    device: torch.device,
    spare: Container[Value],
) -> Sequence[torch.Tensor | None]:
    def concrete(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return environment[leaf]
        if isinstance(leaf, Number):
            number = numbers[leaf.index]
            return _generator(device, int(number.real)) if leaf.kind == "seed" else number
        return device if leaf is HERE else leaf

    args = list(map_leaves(node.args, concrete))
    if node.op == STRIDED_VIEW:
        return [_window(_own_buffer(args[0]), view_of(node.args))]
    if node.op == STRIDED_SCATTER:
        return [_scattered(args[0], args[1], view_of(node.args))]
    if node.op in ("aten::as_strided", "aten::as_strided_scatter"):
        # Offsets count from the start of the value's buffer, which a view of a bigger tensor does not know about.
        args[0] = _own_copy(args[0])
    if node.op == "aten::view.dtype" and args[0].dim() and args[0].shape[-1] == 1:
        # The stride of a dimension of size 1 is free here, but not to PyTorch's kernel.
        args[0] = args[0].as_strided(args[0].shape, (*args[0].stride()[:-1], 1))
    described = operator(node.op)
    written: list[torch.Tensor] = []
    for index in described.written:
        if node.args[index] not in spare:
            args[index] = map_leaves(args[index], lambda leaf: None if leaf is None else _own_copy(leaf))
        written.extend(tensor for tensor in _flat(args[index]) if tensor is not None)
    with seeded(device, None if node.seed is None else int(numbers[node.seed.index].real)):
        result = call(node.op, tuple(args))
    return [*fresh_results(node.op, result), *written]


_listed: ContextVar[Sequence[torch.Generator] | None] = ContextVar("_listed", default=None)


@contextmanager
def drawing_from(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Within the block, seeds are positions in a list of generators, which are drawn from as they are: one that a CUDA
    graph is captured with must not be seeded meanwhile."""
    token = _listed.set(generators)
    try:
        yield
    finally:
        _listed.reset(token)


def _generator(device: torch.device, seed: int) -> torch.Generator:
    listed = _listed.get()
    return torch.Generator(device).manual_seed(seed) if listed is None else listed[seed]


def seeded(device: torch.device, seed: int | None) -> AbstractContextManager[None]:
    """Within the block, the device's default generator draws from a seed; its state is given back."""
    return drawing(None if seed is None else _generator(device, seed))


@contextmanager
def drawing(generator: torch.Generator | None) -> Iterator[None]:
    """Within the block, the default generator of a generator's device draws what that one would."""
    if generator is None:
        yield
    elif generator.device.type == "cuda":
        default = torch.cuda.default_generators[generator.device.index or 0]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)  # may be done while a graph is captured
        try:
            yield
        finally:
            default.graphsafe_set_state(before)
    else:
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(generator.get_state())
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


def _flat(arg: Any) -> list[Any]:
    return [item for part in arg for item in _flat(part)] if isinstance(arg, tuple) else [arg]


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in a buffer of its own, same strides, gaps between elements included."""
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    reach = extent(sizes, strides)
    flat = tensor.as_strided((reach,), (1,)).clone()
    return flat.as_strided(sizes, strides)


def _own_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from the first to the last element of the tensor, as a flat u8 tensor that shares memory with it."""
    reach = extent(tuple(tensor.shape), tuple(tensor.stride()))
    return tensor.as_strided((reach,), (1,)).view(torch.uint8)


def _scattered(base: torch.Tensor, source: torch.Tensor, window: Layout) -> torch.Tensor:
    result = _own_copy(base)
    target = _window(_own_buffer(result), window)
    if is_injective(window.sizes, window.strides):
        target.copy_(source)
    else:  # only operators that write the same everywhere (fill_) may do this: any order will do
        for index in itertools.product(*map(range, window.sizes)):
            target[index] = source[index]
    return result


def _window(buffer: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The buffer seen through a layout."""
    if layout.numel == 0:
        return torch.empty_strided(layout.sizes, layout.strides, dtype=layout.dtype, device=buffer.device)
    start, end = layout.byte_range
    if start < 0 or end > buffer.numel():
        raise IRError(f"evaluate: {layout} reaches past the {buffer.numel()} bytes of its buffer")
    piece = buffer[start:end]
    if piece.storage_offset() % layout.dtype.itemsize:  # the buffer itself starts at an odd place: only reads come here
        piece = piece.clone()
    return piece.view(layout.dtype).as_strided(layout.sizes, layout.strides)


def _as_typed(result: torch.Tensor | None, value: Value, node: Node) -> torch.Tensor:
    """The result in the strides that its type demands."""
    type_ = value.type
    if result is None:
        raise IRError(f"evaluate: nothing was returned for %{value.id} of {node_text(node)}")
    if result.dtype != type_.dtype or tuple(result.shape) != type_.sizes:
        raise IRError(f"evaluate: got {type_text(TensorType.of(result))} for %{value.id} of {node_text(node)}")
    if result.is_conj() or result.is_neg():
        result = result.resolve_conj().resolve_neg()
    if same_addresses(type_.sizes, tuple(result.stride()), type_.strides):
        return result
    if not is_injective(type_.sizes, type_.strides):
        raise IRError(f"evaluate: strides of overlapping elements can only come from a view: {node_text(node)}")
    return torch.empty_strided(type_.sizes, type_.strides, dtype=type_.dtype, device=result.device).copy_(result)
