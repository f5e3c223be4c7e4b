"""The operators that collectives are recorded as, with their kernels for real tensors.

Each has two arguments besides its own: `order`, the tensor that all collectives of a device write, so that they run
in the order of the program; and `ticket`, the number under which `agreement.py` knows the call. A ticket is a number
to the recorder, so it is not part of a graph; a float, since integers are taken for sizes. Groups have names that are
the same on every rank (`groups.py`), so that ranks can share programs.

A kernel runs on the real device. Where the group has no backend for it, the host communicates. It only *starts* a
collective: whoever runs it has `wait(ticket)` called before anything looks at its results (`Group.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tarry.distributed.checks import MOVED
from tarry.distributed.groups import Group, Started, find_group, wait

NAMESPACE = "tarry_c10d"

_SCHEMAS = {
    "all_reduce_": "(Tensor(a!) tensor, Tensor(o!) order, float ticket, str reduction, str group) -> ()",
    "broadcast_": "(Tensor(a!) tensor, Tensor(o!) order, float ticket, int root, str group) -> ()",
    "reduce_": "(Tensor(a!) tensor, Tensor(o!) order, float ticket, str reduction, int root, str group) -> ()",
    "all_gather": "(Tensor tensor, Tensor(o!) order, float ticket, int size, str group) -> Tensor",
    "reduce_scatter": "(Tensor tensor, Tensor(o!) order, float ticket, str reduction, str group) -> Tensor",
    "all_to_all": "(Tensor tensor, Tensor(o!) order, float ticket, int[] output_splits, int[] input_splits, str group)"
    " -> Tensor",
    "gather": "(Tensor tensor, Tensor(o!) order, float ticket, int size, int root, str group) -> Tensor",
    "scatter": "(Tensor tensor, Tensor(o!) order, float ticket, int root, str group) -> Tensor",
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
    library.define("wait(float ticket) -> ()")
    library.impl("wait", wait, "CompositeExplicitAutograd")
    return library


# ---- results, without their contents


def _writes(*_: Any) -> None:
    return None


def _gathered(tensor: Tensor, order: Tensor, ticket: float, size: int, *_: Any) -> Tensor:
    """One part for each rank; none where nothing is gathered."""
    return tensor.new_empty((size, *tensor.shape))


def _part(tensor: Tensor, *_: Any) -> Tensor:
    return tensor.new_empty(tensor.shape[1:])


def _exchanged(tensor: Tensor, order: Tensor, ticket: float, output_splits: list[int], *_: Any) -> Tensor:
    return tensor.new_empty((sum(output_splits), *tensor.shape[1:]))


_SHAPES: dict[str, Callable[..., Tensor]] = {
    "all_gather": _gathered,
    "gather": _gathered,
    "reduce_scatter": _part,
    "scatter": _part,
    "all_to_all": _exchanged,
}


# ---- kernels


def _mean(tensor: Tensor, reduction: str, group: Group) -> None:
    """Finish an AVG, which not all backends have."""
    if reduction == "AVG":
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        tensor.div_(group.process_group.size(), rounding_mode="trunc" if whole else None)


def _reduction(name: str) -> dist.ReduceOp:
    return dist.ReduceOp(getattr(dist.ReduceOp, "SUM" if name == "AVG" else name))


def _in_place(
    group: Group, ticket: float, tensor: Tensor, call: Callable[[Tensor], Any], finish: Callable[[Tensor], None]
) -> None:
    """Have a collective write a tensor, or a copy of it where it is not contiguous or the group cannot reach it."""

    def start() -> Started:
        given = group.reachable(tensor)

        def end() -> None:
            finish(given)
            if given is not tensor:
                tensor.copy_(given)

        return Started(call(given), (given, tensor), end)

    group.run(ticket, start)


def _as_bytes(tensor: Tensor) -> Tensor:
    """A tensor that is only moved, as bytes where gloo does not know its dtype."""
    if tensor.device.type != "cpu" or tensor.dtype in MOVED:
        return tensor
    return tensor.unsqueeze(-1).view(torch.uint8)


def _all_reduce(tensor: Tensor, order: Tensor, ticket: float, reduction: str, name: str) -> None:
    group = find_group(name)
    options = dist.AllreduceOptions()
    options.reduceOp = _reduction(reduction)
    _in_place(
        group,
        ticket,
        tensor,
        lambda tensor: group.process_group.allreduce([tensor], options),
        lambda tensor: _mean(tensor, reduction, group),
    )


def _broadcast(tensor: Tensor, order: Tensor, ticket: float, root: int, name: str) -> None:
    group = find_group(name)
    options = dist.BroadcastOptions()
    options.rootRank = root
    _in_place(
        group,
        ticket,
        tensor,
        lambda tensor: group.process_group.broadcast([_as_bytes(tensor)], options),
        lambda tensor: None,
    )


def _reduce(tensor: Tensor, order: Tensor, ticket: float, reduction: str, root: int, name: str) -> None:
    group = find_group(name)
    options = dist.ReduceOptions()
    options.reduceOp = _reduction(reduction)
    options.rootRank = root

    def call(tensor: Tensor) -> Any:
        return group.process_group.reduce([tensor], options)

    if group.process_group.rank() == root:
        _in_place(group, ticket, tensor, call, lambda tensor: _mean(tensor, reduction, group))
    else:  # backends leave partial sums in it

        def start() -> Started:
            given = group.reachable(tensor).clone()
            return Started(call(given), (given,))

        group.run(ticket, start)


def _fresh(
    group: Group,
    ticket: float,
    tensor: Tensor,
    sizes: Sequence[int],
    call: Callable[[Tensor, Tensor], Any],
    finish: Callable[[Tensor], None] = lambda result: None,
) -> Tensor:
    """Have a collective give a tensor of these sizes; `call` takes what is given and what is to be written."""
    result = tensor.new_empty(tuple(sizes))

    def start() -> Started:
        given = group.reachable(tensor)
        written = result if given.device == result.device else given.new_empty(tuple(sizes))

        def end() -> None:
            finish(written)
            if written is not result:
                result.copy_(written)

        return Started(call(given, written), (given, written, result), end)

    group.run(ticket, start)
    return result


def _all_gather(tensor: Tensor, order: Tensor, ticket: float, size: int, name: str) -> Tensor:
    group = find_group(name)

    def call(given: Tensor, parts: Tensor) -> Any:
        return group.process_group.allgather([list(_as_bytes(parts).unbind())], [_as_bytes(given)])

    return _fresh(group, ticket, tensor, (size, *tensor.shape), call)


def _reduce_scatter(tensor: Tensor, order: Tensor, ticket: float, reduction: str, name: str) -> Tensor:
    group = find_group(name)
    options = dist.ReduceScatterOptions()
    options.reduceOp = _reduction(reduction)

    def call(given: Tensor, part: Tensor) -> Any:
        return group.process_group.reduce_scatter([part], [list(given.unbind())], options)

    return _fresh(group, ticket, tensor, tensor.shape[1:], call, lambda part: _mean(part, reduction, group))


def _all_to_all(
    tensor: Tensor, order: Tensor, ticket: float, output_splits: Sequence[int], input_splits: Sequence[int], name: str
) -> Tensor:
    group = find_group(name)

    def call(given: Tensor, result: Tensor) -> Any:
        splits = (list(output_splits), list(input_splits))
        return group.process_group.alltoall_base(_as_bytes(result), _as_bytes(given), *splits, dist.AllToAllOptions())

    return _fresh(group, ticket, tensor, (sum(output_splits), *tensor.shape[1:]), call)


def _gather(tensor: Tensor, order: Tensor, ticket: float, size: int, root: int, name: str) -> Tensor:
    group = find_group(name)
    options = dist.GatherOptions()
    options.rootRank = root

    def call(given: Tensor, parts: Tensor) -> Any:
        results = [list(_as_bytes(parts).unbind())] if size else []
        return group.process_group.gather(results, [_as_bytes(given)], options)

    return _fresh(group, ticket, tensor, (size, *tensor.shape), call)


def _scatter(tensor: Tensor, order: Tensor, ticket: float, root: int, name: str) -> Tensor:
    group = find_group(name)
    options = dist.ScatterOptions()
    options.rootRank = root

    def call(given: Tensor, part: Tensor) -> Any:
        parts = [list(_as_bytes(given).unbind())] if len(given) else []
        return group.process_group.scatter([_as_bytes(part)], parts, options)

    return _fresh(group, ticket, tensor, tensor.shape[1:], call)


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
