"""The operators that collectives are recorded as, with their kernels for real tensors.

Each has two arguments besides its own: `order`, the tensor that all collectives of a device write, so that they run in the order
of the program; and `ticket`, the number under which `agreement.py` knows the call. A ticket is a number to the recorder, so it is
not part of a graph; a float, since integers are taken for sizes. Groups have names that are the same on every rank (`groups.py`), so that ranks can share programs.

A kernel runs on the real device. Where the group has no backend for it, the host communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tarry.distributed.groups import Group, find_group

NAMESPACE = "tarry_c10d"

_SCHEMAS = {
    "all_reduce_": "(Tensor(a!) input, Tensor(o!) order, float ticket, str reduction, str group) -> ()",
    "broadcast_": "(Tensor(a!) input, Tensor(o!) order, float ticket, int root, str group) -> ()",
    "reduce_": "(Tensor(a!) input, Tensor(o!) order, float ticket, str reduction, int root, str group) -> ()",
    "all_gather": "(Tensor input, Tensor(o!) order, float ticket, int size, str group) -> Tensor",
    "reduce_scatter": "(Tensor input, Tensor(o!) order, float ticket, str reduction, str group) -> Tensor",
    "all_to_all": "(Tensor input, Tensor(o!) order, float ticket, int[] output_splits, int[] input_splits, str group)"
    " -> Tensor",
    "gather": "(Tensor input, Tensor(o!) order, float ticket, int size, int root, str group) -> Tensor",
    "scatter": "(Tensor input, Tensor(o!) order, float ticket, int root, str group) -> Tensor",
}
"""ir.operators.COLLECTIVES has the same names."""


def define() -> torch.library.Library:
    """Declare the operators; they are there as long as the result lives."""
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _SHAPES.get(name, _writes), "Meta")
        for key in ("CPU", "CUDA"):
            library.impl(name, _KERNELS[name], key)
    return library


# ---- results, without their contents


def _writes(*_: Any) -> None:
    return None


def _gathered(input: Tensor, order: Tensor, ticket: float, size: int, *_: Any) -> Tensor:
    """One part for each rank; none where nothing is gathered."""
    return input.new_empty((size, *input.shape))


def _part(input: Tensor, *_: Any) -> Tensor:
    return input.new_empty(input.shape[1:])


def _exchanged(input: Tensor, order: Tensor, ticket: float, output_splits: list[int], *_: Any) -> Tensor:
    return input.new_empty((sum(output_splits), *input.shape[1:]))


_SHAPES: dict[str, Callable[..., Tensor]] = {
    "all_gather": _gathered,
    "gather": _gathered,
    "reduce_scatter": _part,
    "scatter": _part,
    "all_to_all": _exchanged,
}


# ---- kernels


def _reduction(name: str) -> dist.ReduceOp:
    return dist.ReduceOp(getattr(dist.ReduceOp, name))


def _in_place(group: Group, ticket: float, input: Tensor, call: Callable[[Tensor], Any]) -> None:
    """Have a collective write a tensor, or a copy of it where it is not contiguous or the group cannot reach it."""
    with group.turn(ticket):
        given = group.reachable(input)
        group.finish(call(given))
        if given is not input:
            input.copy_(given)


def _all_reduce(input: Tensor, order: Tensor, ticket: float, reduction: str, name: str) -> None:
    group = find_group(name)
    options = dist.AllreduceOptions()
    options.reduceOp = _reduction(reduction)
    _in_place(group, ticket, input, lambda tensor: group.process_group.allreduce([tensor], options))


def _broadcast(input: Tensor, order: Tensor, ticket: float, root: int, name: str) -> None:
    group = find_group(name)
    options = dist.BroadcastOptions()
    options.rootRank = root
    _in_place(group, ticket, input, lambda tensor: group.process_group.broadcast([tensor], options))


def _reduce(input: Tensor, order: Tensor, ticket: float, reduction: str, root: int, name: str) -> None:
    group = find_group(name)
    options = dist.ReduceOptions()
    options.reduceOp = _reduction(reduction)
    options.rootRank = root
    if group.process_group.rank() == root:
        _in_place(group, ticket, input, lambda tensor: group.process_group.reduce([tensor], options))
    else:  # backends leave partial sums in it
        with group.turn(ticket):
            group.finish(group.process_group.reduce([group.reachable(input).clone()], options))


def _all_gather(input: Tensor, order: Tensor, ticket: float, size: int, name: str) -> Tensor:
    group = find_group(name)
    with group.turn(ticket):
        given = group.reachable(input)
        parts = given.new_empty((size, *given.shape))
        group.finish(group.process_group.allgather([list(parts.unbind())], [given]))
        return parts.to(input.device)


def _reduce_scatter(input: Tensor, order: Tensor, ticket: float, reduction: str, name: str) -> Tensor:
    group = find_group(name)
    options = dist.ReduceScatterOptions()
    options.reduceOp = _reduction(reduction)
    with group.turn(ticket):
        given = group.reachable(input)
        part = given.new_empty(given.shape[1:])
        group.finish(group.process_group.reduce_scatter([part], [list(given.unbind())], options))
        return part.to(input.device)


def _all_to_all(
    input: Tensor, order: Tensor, ticket: float, output_splits: Sequence[int], input_splits: Sequence[int], name: str
) -> Tensor:
    group = find_group(name)
    with group.turn(ticket):
        given = group.reachable(input)
        result = given.new_empty((sum(output_splits), *given.shape[1:]))
        work = group.process_group.alltoall_base(
            result, given, list(output_splits), list(input_splits), dist.AllToAllOptions()
        )
        group.finish(work)
        return result.to(input.device)


def _gather(input: Tensor, order: Tensor, ticket: float, size: int, root: int, name: str) -> Tensor:
    group = find_group(name)
    options = dist.GatherOptions()
    options.rootRank = root
    with group.turn(ticket):
        given = group.reachable(input)
        parts = given.new_empty((size, *given.shape))
        group.finish(group.process_group.gather([list(parts.unbind())] if size else [], [given], options))
        return parts.to(input.device)


def _scatter(input: Tensor, order: Tensor, ticket: float, root: int, name: str) -> Tensor:
    group = find_group(name)
    options = dist.ScatterOptions()
    options.rootRank = root
    with group.turn(ticket):
        given = group.reachable(input)
        part = given.new_empty(given.shape[1:])
        group.finish(group.process_group.scatter([part], [list(given.unbind())] if len(given) else [], options))
        return part.to(input.device)


_KERNELS: dict[str, Callable[..., Any]] = {
    "all_reduce_": _all_reduce,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
}
