"""Kernels of PyTorch's collectives (operators of the namespace `c10d`) for tensors of the device: they record.

PyTorch's schemas have all tensors in lists, of which only the first counts. A kernel returns a `Work` that is done:
what it would wait for is recorded already, and the host waits for it where it reads. Sums with a factor, which not all
backends have, are recorded as what they are made of.

Collectives on tensors of the CPU run when they are called. Recorded ones that the program has called before must come
first: on other ranks they may have run already, and wait. So those of the CPU compute what is pending first.

Private names of torch: the `c10d` operators and their schemas, `ProcessGroup.unbox`,
`_AutoDispatchBelowAutograd`, `_c10d_functional` operators, `_resolve_process_group`,
`distributed_c10d.BackendConfig`, `Backend.backend_capability`, `rendezvous._create_c10d_store` (2.11 and 2.13)."""

from __future__ import annotations

import functools
import importlib
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tarry.distributed import groups, messages, operators
from tarry.distributed.checks import are_alike, check_like, check_list, check_reduction

_REDUCTIONS = {value.value: name for name, value in dist.ReduceOp.RedOpType.__members__.items()}
_HOST_CALLS = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_"),
    *("allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_"),
    *("reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier"),
    *("monitored_barrier_", "send", "recv_", "recv_any_source_"),
)


def install(
    synchronize: Callable[[], None],
    reduction: Callable[[Any], tuple[int, Any]],
    place: Callable[[], str],
    leave: Callable[[float], bool],
    work: Callable[[Sequence[Tensor]], Any],
) -> None:
    """Register the kernels, and the device with process groups: `init_process_group()`, "tarry", "gloo" and
    "cpu:gloo,tarry:gloo" all serve it."""
    kernels = Kernels(synchronize, reduction, place, work)
    groups.install(leave)
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # as an attribute, it is a function
    rendezvous._create_c10d_store = _of_this_attempt(rendezvous._create_c10d_store)  # type: ignore[attr-defined]
    dist.Backend.register_backend("tarry", _process_group, devices=["tarry"])
    dist.Backend.backend_capability["gloo"].append("tarry")
    distributed_c10d.BackendConfig.__init__ = _with_host(distributed_c10d.BackendConfig.__init__)  # type: ignore[method-assign]
    kernels.register()


def _process_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The backend `tarry`. Recorded collectives run on real tensors, with the group's backend for these; this one
    compares what ranks are about to do (`agreement.py`), and is there for what PyTorch asks of a device's backend."""
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _of_this_attempt(plain: Callable[..., Any]) -> Callable[..., Any]:
    """torchrun keeps its store when it starts the processes of a machine again. There gloo finds the addresses of those
    that have ended, and if it reads one before it is replaced, all ranks wait for ever. So each attempt has keys of its
    own. Not on several machines, whose agents may count attempts differently."""

    @functools.wraps(plain)
    def create(*args: Any, **kwargs: Any) -> Any:
        store = plain(*args, **kwargs)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
            return store
        return distributed_c10d.PrefixStore(f"attempt {attempt}", store)

    return create


def _with_host(plain: Callable[..., None]) -> Callable[..., None]:
    """Groups for tarry have a backend for the CPU: barriers and collectives of objects use it, and recorded
    collectives. Comparisons have another one, so that no message is taken for one of these."""

    def initialise(self: Any, backend: Any) -> None:
        plain(self, backend)
        if "tarry" in self.device_backend_map:
            self.device_backend_map.setdefault("cpu", dist.Backend("gloo"))
            if self.device_backend_map["tarry"] == "gloo":
                self.device_backend_map["tarry"] = dist.Backend("tarry")

    return initialise


def _without_devices(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Barriers go over the host. Programs for CUDA give the number of a rank's device, which processes that share a
    device do not have."""

    @functools.wraps(plain)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        return plain(group, async_op, None, *args, **kwargs)

    return barrier


class Reduction(NamedTuple):
    """The name of a `ReduceOp`, and the factor of a PREMUL_SUM."""

    op: str
    factor: Any


class Kernels:
    def __init__(
        self,
        synchronize: Callable[[], None],
        reduction: Callable[[Any], tuple[int, Any]],
        place: Callable[[], str],
        work: Callable[[Sequence[Tensor]], Any],
    ) -> None:
        self._work = work
        self._synchronize = synchronize
        self._look_into = reduction
        self._place = place
        self._flushing = threading.local()
        self._libraries: list[torch.library.Library] = []

    def register(self) -> None:
        self._libraries.append(operators.define())
        library = torch.library.Library("c10d", "IMPL")
        receiver = messages.Receiver()
        table: dict[str, Callable[..., Any]] = {
            "allreduce_": self.allreduce,
            "allreduce_coalesced_": self.allreduce_coalesced,
            "broadcast_": self.broadcast,
            "reduce_": self.reduce,
            "allgather_": self.allgather,
            "_allgather_base_": self.allgather_base,
            "allgather_coalesced_": self.allgather_coalesced,
            "allgather_into_tensor_coalesced_": self.allgather_into_tensor_coalesced,
            "reduce_scatter_": self.reduce_scatter,
            "_reduce_scatter_base_": self.reduce_scatter_base,
            "reduce_scatter_tensor_coalesced_": self.reduce_scatter_tensor_coalesced,
            "gather_": self.gather,
            "scatter_": self.scatter,
            "alltoall_": self.alltoall,
            "alltoall_base_": self.alltoall_base,
            "barrier": messages.on_host("barrier"),
            "monitored_barrier_": messages.on_host("monitored_barrier_"),
            "send": messages.send,
            "recv_": receiver.kernel("recv_"),
            "recv_any_source_": receiver.kernel("recv_any_source_"),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch has kernels for all devices, which call a device's backend
            for name, kernel in table.items():
                library.impl(name, torch.no_grad()(kernel), "PrivateUse1", allow_override=True)
                for key in ("SparsePrivateUse1", "SparseCsrPrivateUse1"):
                    library.impl(name, _refuses_sparse(name), key, allow_override=True)
            library.impl(
                "allreduce_", torch.no_grad()(self.allreduce_of_sparse), "SparsePrivateUse1", allow_override=True
            )
            for name in _HOST_CALLS:
                library.impl(name, self._after_recorded(name), "AutogradCPU", allow_override=True)
            functional = torch.library.Library("_c10d_functional", "IMPL")
            for name, kernel in self.functional().items():
                functional.impl(name, torch.no_grad()(kernel), "PrivateUse1", allow_override=True)
        self._libraries += [library, functional]
        dist.destroy_process_group = self._before_destroying(dist.destroy_process_group)
        distributed_c10d.destroy_process_group = dist.destroy_process_group
        dist.barrier = distributed_c10d.barrier = _without_devices(dist.barrier)

    # ---- order between recorded collectives and others

    def flush(self) -> None:
        """Run the collectives that are recorded; not from within a step that runs them."""
        if groups.has_pending() and not groups.of_other_threads() and not getattr(self._flushing, "on", False):
            self._flushing.on = True
            try:
                self._synchronize()
            finally:
                self._flushing.on = False

    def _after_recorded(self, name: str) -> Callable[..., Any]:
        """A kernel that runs what is recorded, then the CPU's. If the program waits for that one, it gets an error
        where it would wait in vain."""
        operator = getattr(torch.ops.c10d, name).default
        arguments = operator._schema.arguments
        names = [argument.name for argument in arguments]
        group_at = names.index("process_group")
        asynchronous_at = next((k for k, each in enumerate(names) if each in ("async_op", "asyncOp")), len(names))

        def kernel(*args: Any) -> Any:
            if groups.running():
                with torch._C._AutoDispatchBelowAutograd():
                    return operator(*args)
            self.flush()
            waits = asynchronous_at < len(args) and not args[asynchronous_at]
            begun = groups.begin_on_host(_unboxed(args[group_at]), name.strip("_"), self._place)
            with torch._C._AutoDispatchBelowAutograd():
                result = operator(*args)
            if waits and begun:
                work = result[-1] if isinstance(result, tuple) else result
                begun.wait(dist.Work.unbox(work))
            return result

        return kernel

    def _before_destroying(self, plain: Callable[..., None]) -> Callable[..., None]:
        def destroy_process_group(group: Any = None) -> None:
            self.flush()
            plain(group)
            if not dist.is_initialized():
                groups.forget_groups()

        destroy_process_group.__doc__ = plain.__doc__
        return destroy_process_group

    # ---- recording

    def _record(self, name: str, process_group: dist.ProcessGroup, tensor: Tensor, *args: Any, note: str = "") -> Any:
        """Record one of our operators on a tensor's contents. What is written counts no version, as on other
        devices. A group of one rank has nothing to send, and its steps no collectives."""
        if process_group.size() == 1:
            return _alone(name, tensor.data)
        group = groups.group_of(process_group)
        ticket = group.record(f"{name.rstrip('_')} of {_type_text(name, tensor)}{note}", self._place())
        try:
            order = groups.order_of(tensor.device)
            return getattr(torch.ops.tarry_c10d, name).default(tensor.data, order, ticket, *args, group.name)
        except BaseException:
            group.withdraw(ticket)
            raise

    def _reduction(self, boxed: Any) -> Reduction:
        number, factor = self._look_into(boxed)
        return Reduction(_REDUCTIONS[number], factor)

    def _reduced(
        self, name: str, process_group: dist.ProcessGroup, tensor: Tensor, reduction: Reduction, *args: Any
    ) -> Any:
        """Record a collective that reduces: in place, or with a result. `args` follow the reduction."""
        op, factor = reduction
        check_reduction(name, process_group, tensor, op)
        given = tensor.data
        in_place = name.endswith("_")
        if factor is not None:
            given = given.mul_(factor) if in_place else given * factor
        note = f", {op}" + "".join(f", root {root}" for root in args)
        return self._record(name, process_group, given, "SUM" if op == "PREMUL_SUM" else op, *args, note=note)

    # ---- operators that write their arguments: torch.distributed, and the reducer of DDP

    def allreduce(
        self, tensors: list[Tensor], group: Any, reduction: Any, sparse_indices: Any = None, *_: Any
    ) -> tuple[list[Tensor], Any]:
        if sparse_indices is not None:
            raise NotImplementedError("all_reduce with indices for sparse tensors is not there on tarry")
        return tensors, self.allreduce_coalesced(tensors, group, reduction)

    def allreduce_of_sparse(self, tensors: list[Tensor], *args: Any) -> tuple[list[Tensor], Any]:
        """Of opaque tensors, which no graph holds: the host communicates."""
        for tensor in tensors:
            host = tensor.detach().cpu()
            _, work = torch.ops.c10d.allreduce_([host], *args)
            dist.Work.unbox(work).wait()
            tensor.copy_(host)
        return tensors, self._work(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], group: Any, reduction: Any, *_: Any) -> Any:
        for tensor in tensors:
            self._reduced("all_reduce_", _unboxed(group), tensor, self._reduction(reduction))
        return self._work(tensors)

    def broadcast(
        self, tensors: list[Tensor], group: Any, root: int, root_tensor: int = 0, *_: Any
    ) -> tuple[list[Tensor], Any]:
        for tensor in tensors:
            self._record("broadcast_", _unboxed(group), tensor, root, note=f", root {root}")
        return tensors, self._work(tensors)

    def reduce(self, tensors: list[Tensor], group: Any, reduction: Any, root: int, *_: Any) -> Any:
        for tensor in tensors:
            self._reduced("reduce_", _unboxed(group), tensor, self._reduction(reduction), root)
        return self._work(tensors)

    def allgather(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], group: Any, *_: Any
    ) -> tuple[list[list[Tensor]], Any]:
        for output, tensor in zip(outputs, tensors, strict=True):
            self._gather_each(output, tensor, _unboxed(group))
        return outputs, self._work(outputs[0])

    def _gather_each(self, outputs: list[Tensor], tensor: Tensor, group: dist.ProcessGroup) -> None:
        """A tensor of each rank. If they have different sizes, each rank broadcasts its own, as with NCCL."""
        check_list("all_gather", outputs, group)
        if are_alike(outputs):
            check_like("all_gather", outputs, tensor)
            _write(outputs, self._record("all_gather", group, tensor, len(outputs)).unbind())
            return
        check_like("all_gather", [outputs[group.rank()]], tensor)
        outputs[group.rank()].data.copy_(tensor.data)
        for rank, output in enumerate(outputs):
            self._record("broadcast_", group, output, rank, note=f", root {rank}")

    def allgather_coalesced(self, outputs: list[list[Tensor]], tensors: list[Tensor], group: Any, *_: Any) -> Any:
        """A list for each rank, with as many tensors as are given."""
        self.allgather([list(output) for output in zip(*outputs, strict=True)], tensors, group)
        return self._work([tensor for output in outputs for tensor in output])

    def allgather_base(self, output: Tensor, tensor: Tensor, group: Any, *_: Any) -> tuple[Tensor, Any]:
        self._gather_into(output, tensor, _unboxed(group))
        return output, self._work([output])

    def _gather_into(self, output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
        size = group.size()
        if output.numel() != tensor.numel() * size or output.dtype != tensor.dtype:
            raise ValueError(
                f"all_gather: the output has {output.numel()} elements of {output.dtype}, and {size} ranks give "
                f"{tensor.numel()} of {tensor.dtype} each"
            )
        _write([output], [self._record("all_gather", group, tensor, size).view(output.shape)])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], group: Any, *_: Any) -> Any:
        for output, tensor in zip(outputs, tensors, strict=True):
            self._gather_into(output, tensor, _unboxed(group))
        return self._work(outputs)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], group: Any, reduction: Any, *_: Any
    ) -> tuple[list[Tensor], Any]:
        for output, parts in zip(outputs, inputs, strict=True):
            self._scatter_each(output, parts, _unboxed(group), self._reduction(reduction))
        return outputs, self._work(outputs)

    def _scatter_each(
        self, output: Tensor, parts: list[Tensor], group: dist.ProcessGroup, reduction: Reduction
    ) -> None:
        """A reduced tensor for each rank. If they have different sizes, each is reduced to its rank, as with NCCL."""
        check_list("reduce_scatter", parts, group)
        check_like("reduce_scatter", [parts[group.rank()]], output)
        if are_alike(parts):
            _write([output], [self._reduced("reduce_scatter", group, torch.stack(list(parts)), reduction)])
            return
        copies = [part.data.clone() for part in parts]
        for rank, part in enumerate(copies):
            self._reduced("reduce_", group, part, reduction, rank)
        _write([output], [copies[group.rank()]])

    def reduce_scatter_base(
        self, output: Tensor, tensor: Tensor, group: Any, reduction: Any, *_: Any
    ) -> tuple[Tensor, Any]:
        self._scatter_into(output, tensor, _unboxed(group), self._reduction(reduction))
        return output, self._work([output])

    def _scatter_into(self, output: Tensor, tensor: Tensor, group: dist.ProcessGroup, reduction: Reduction) -> None:
        size = group.size()
        if output.numel() * size != tensor.numel() or output.dtype != tensor.dtype:
            raise ValueError(
                f"reduce_scatter: the input has {tensor.numel()} elements of {tensor.dtype}, and {size} ranks take "
                f"{output.numel()} of {output.dtype} each"
            )
        parts = tensor.data.reshape(size, *output.shape)
        _write([output], [self._reduced("reduce_scatter", group, parts, reduction)])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], group: Any, reduction: Any, *_: Any
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._scatter_into(output, tensor, _unboxed(group), self._reduction(reduction))
        return self._work(outputs)

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], group: Any, root: int, *_: Any) -> Any:
        (tensor,) = tensors
        results = outputs[0] if outputs else []
        if results:
            check_list("gather", results, _unboxed(group))
            check_like("gather", results, tensor)
        parts = self._record("gather", _unboxed(group), tensor, len(results), root, note=f", root {root}")
        _write(results, parts.unbind())
        return self._work(results)

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], group: Any, root: int, *_: Any
    ) -> tuple[list[Tensor], Any]:
        (output,) = outputs
        if inputs:
            check_list("scatter", inputs[0], _unboxed(group))
            check_like("scatter", inputs[0], output)
        given = torch.stack(list(inputs[0])) if inputs else output.data.new_empty((0, *output.shape))
        _write([output], [self._record("scatter", _unboxed(group), given, root, note=f", root {root}")])
        return outputs, self._work(outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], group: Any, *_: Any) -> tuple[list[Tensor], Any]:
        for tensors in (outputs, inputs):
            check_list("all_to_all", tensors, _unboxed(group))
        given = torch.cat([tensor.data.reshape(-1) for tensor in inputs])
        splits = [[tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)]
        parts = self._record("all_to_all", _unboxed(group), given, *splits).split(splits[0])
        _write(outputs, [part.view(output.shape) for part, output in zip(parts, outputs, strict=True)])
        return outputs, self._work(outputs)

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, group: Any, output_splits: list[int], input_splits: list[int], *_: Any
    ) -> Any:
        size = _unboxed(group).size()
        given = [splits or [len(of) // size] * size for splits, of in ((output_splits, output), (input_splits, tensor))]
        for splits, of, name in zip(given, (output, tensor), ("output", "input"), strict=True):
            if sum(splits) != len(of):
                raise ValueError(f"all_to_all: the {name} has {len(of)} rows, and its splits are {splits}")
        if output.shape[1:].numel() != tensor.shape[1:].numel():
            raise ValueError(f"all_to_all: rows are of shape {list(tensor.shape[1:])}, not {list(output.shape[1:])}")
        _write([output], [self._record("all_to_all", _unboxed(group), tensor, *given).view(output.shape)])
        return self._work([output])

    # ---- operators with results: functional collectives, which DTensor uses

    def functional(self) -> dict[str, Callable[..., Any]]:
        def all_reduce_(tensor: Tensor, op: str, group: Any) -> Tensor:
            self._reduced("all_reduce_", _resolved(group), tensor, Reduction(op.upper(), None))
            return tensor

        def broadcast_(tensor: Tensor, root: int, group: Any) -> Tensor:
            self._record("broadcast_", _resolved(group), tensor, root, note=f", root {root}")
            return tensor

        def all_gather(tensor: Tensor, size: int, group: Any, *, out: Tensor | None = None) -> Tensor:
            if out is None:
                out = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]) if tensor.ndim else (size,))
            self._gather_into(out, tensor, _resolved(group))
            return out

        def reduce_scatter(tensor: Tensor, op: str, size: int, group: Any, *, out: Tensor | None = None) -> Tensor:
            if out is None:
                out = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
            self._scatter_into(out, tensor, _resolved(group), Reduction(op.upper(), None))
            return out

        def all_to_all(tensor: Tensor, output_splits: list[int], input_splits: list[int], group: Any) -> Tensor:
            return self._record("all_to_all", _resolved(group), tensor, list(output_splits), list(input_splits))

        return {
            "all_reduce": lambda tensor, *args: all_reduce_(tensor.clone(), *args),
            "all_reduce_": all_reduce_,
            "all_reduce_coalesced": lambda tensors, *args: [all_reduce_(tensor.clone(), *args) for tensor in tensors],
            "all_reduce_coalesced_": lambda tensors, *args: [all_reduce_(tensor, *args) for tensor in tensors],
            "broadcast": lambda tensor, *args: broadcast_(tensor.clone(), *args),
            "broadcast_": broadcast_,
            "all_gather_into_tensor": all_gather,
            "all_gather_into_tensor_out": all_gather,
            "all_gather_into_tensor_coalesced": lambda tensors, *args: [
                all_gather(tensor, *args) for tensor in tensors
            ],
            "reduce_scatter_tensor": reduce_scatter,
            "reduce_scatter_tensor_out": reduce_scatter,
            "reduce_scatter_tensor_coalesced": lambda tensors, *args: [reduce_scatter(each, *args) for each in tensors],
            "all_to_all_single": all_to_all,
            "wait_tensor": lambda tensor: tensor,
            # From PyTorch 2.12 on, for tensors that wait when they are read. Not a view: it may be written.
            "_wrap_tensor_autograd": lambda tensor: tensor.data,
        }


def _refuses_sparse(name: str) -> Callable[..., Any]:
    def kernel(*_: Any) -> Any:
        raise NotImplementedError(f"{name.strip('_')} of sparse tensors is not there: use to_dense() before it")

    return kernel


def _unboxed(group: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(group)


def _resolved(group: Any) -> dist.ProcessGroup:
    """A group by its name; newer versions of PyTorch hand over the group itself."""
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(group) if isinstance(group, str) else group


def _alone(name: str, tensor: Tensor) -> Any:
    """What a collective gives where there is one rank; those with a "_" would write what is there already."""
    if name.endswith("_"):
        return None
    if name in ("all_gather", "gather"):
        return tensor.contiguous().unsqueeze(0)
    return tensor.clone(memory_format=torch.contiguous_format) if name == "all_to_all" else tensor[0]


def _type_text(name: str, tensor: Tensor) -> str:
    """The part of a tensor's type that all ranks have in common."""
    # Only the root of a scatter has parts to give, and in an exchange each rank may give other numbers of rows.
    sizes = tensor.shape[1:] if name in ("scatter", "all_to_all") else tensor.shape
    return f"{str(tensor.dtype)[6:]}[{', '.join(map(str, sizes))}]"


def _write(tensors: Sequence[Tensor], contents: Sequence[Tensor]) -> None:
    for tensor, content in zip(tensors, contents, strict=True):
        tensor.data.copy_(content)
