"""Data that only a backend can read: how storages hold them from step to step, and how they become tensors again.

A storage holds a tensor. Where a backend keeps data of its own (`capabilities.opaque_data`), that tensor is one on the
meta device, without memory, which carries the backend's `Data`: it *stands in* for them. A tensor of the real device
that was given to such a backend carries the data made from it as well, so that a parameter is transferred once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tarry import events
from tarry.backends.base import Backend, Batch, Data
from tarry.errors import BackendError
from tarry.ir.graph import Value
from tarry.ir.layout import TensorType, same_addresses
from tarry.ir.text import type_text
from tarry.runtime.dispatch import PlainDispatch

_stand_ins: weakref.WeakSet[Data] = weakref.WeakSet()  # data that nothing but the backend holds
_copies: weakref.WeakSet[Data] = weakref.WeakSet()  # data made from a tensor that is still there
_shared: weakref.WeakSet[Data] = weakref.WeakSet()  # data that more than one tensor may see
_moving = threading.Lock()  # guards that `backend` and `value` of data are read together


class _Host(Backend):
    """What became of the data of backends that are gone: tensors, or the error that reading them gave."""

    name = "host"

    def to_tensor(self, data: Any) -> torch.Tensor:
        if isinstance(data, Exception):
            raise data
        return super().to_tensor(data)


_HOST = _Host()


def converts(backend: Backend) -> bool:
    """Whether the backend's data are anything but the tensors themselves."""
    kind = type(backend)
    return kind.to_data is not Backend.to_data or kind.to_tensor is not Backend.to_tensor


def empty(type_: TensorType, device: torch.device | str) -> torch.Tensor:
    """A tensor of a type, of whatever contents."""
    return torch.empty_strided(type_.sizes, type_.strides, dtype=type_.dtype, device=device)


def as_typed(tensor: Any, type_: TensorType, source: Callable[[], str]) -> torch.Tensor:
    """A tensor exactly as a type says, copied if it has other strides or does not lie at the start of its buffer."""
    if not isinstance(tensor, torch.Tensor):
        raise BackendError(f"{source()} gave a {type(tensor).__name__}, not a tensor")
    if tensor.dtype != type_.dtype or tuple(tensor.shape) != type_.sizes:
        raise BackendError(f"{source()} gave {type_text(TensorType.of(tensor))} instead of {type_text(type_)}")
    lazy = tensor.is_conj() or tensor.is_neg()
    if not lazy and tensor.storage_offset() == 0 and same_addresses(type_.sizes, tensor.stride(), type_.strides):
        return tensor
    return empty(type_, tensor.device).copy_(tensor)


# ---- from a backend's data to tensors


def _stand_in(data: Data) -> torch.Tensor:
    tensor = empty(data.type, "meta")
    tensor._tarry_data = data  # type: ignore[attr-defined]
    _stand_ins.add(data)
    return tensor


def read_stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of the real device for one that stands in for a backend's data."""
    data: Data | None = getattr(tensor, "_tarry_data", None)
    if data is None or not data.has_value:
        raise BackendError("these data belong to a backend that has not given them a value")
    with PlainDispatch():
        return _read(data)


def share_stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor that stands in for the same data, for a storage of another device. What is overwritten is copied
    first from now on."""
    data: Data = tensor._tarry_data  # type: ignore[attr-defined]
    with _moving:
        other = data.backend.placeholder(data.type)
        other.assign(data)
    _shared.update((data, other))
    return _stand_in(other)


def _read(data: Data) -> torch.Tensor:
    with _moving:
        backend, value = data.backend, data.value
    return as_typed(backend.to_tensor(value), data.type, lambda: f"backend {backend.name!r}: to_tensor(data)")


def evacuate(backends: Sequence[Backend]) -> None:
    """Make tensors of all that backends hold: they are about to go."""
    for data in list(_stand_ins):
        if data.backend in backends and data.has_value:
            value: torch.Tensor | Exception
            try:
                with PlainDispatch():
                    value = _read(data).clone()  # the backend's own memory goes with it
            except Exception as error:
                value = error
            with _moving:
                data.backend, data.value = _HOST, value
    for data in list(_copies):
        if data.backend in backends:
            with _moving:
                data.backend, data.value, data.has_value = _HOST, None, False


# ---- a step's inputs and results


def opaque_inputs(
    backend: Backend, batch: Batch, inputs: Sequence[Value], update: Sequence[int], unread: Sequence[int]
) -> list[Data | None]:
    """The backend's data for the inputs; None for those at the positions in `unread`, which are not transferred. Those
    at the positions in `update` belong to the step alone, for it will overwrite them."""
    given: list[Data | None] = []
    device = torch.device(backend.device)
    tensors: list[Any] = batch.own_inputs()
    for position, value in enumerate(inputs):
        if position in unread:
            given.append(None)
            continue
        if tensors[position] is None:  # it is overwritten unread
            tensors[position] = empty(value.type, device)
        tensor = tensors[position]
        data: Data | None = getattr(tensor, "_tarry_data", None)
        if data is None or data.backend is not backend or not data.has_value:
            if data is None or not tensor.is_meta:
                data = _transfer(backend, tensor.to(device), value.type)
            else:
                data = _received(backend, data)
            tensor._tarry_data = data
            (_stand_ins if tensor.is_meta else _copies).add(data)
        given.append(data)
    for position in update:
        data, tensor = given[position], tensors[position]
        assert data is not None
        # The leaf of the graph and the Python object at hand know the tensor: another owner would see the write.
        if data in _shared or tensor._use_count() > 2:
            given[position] = _transfer(backend, _read(data).clone(), data.type)
    return given


def _transfer(backend: Backend, tensor: torch.Tensor, type_: TensorType) -> Data:
    events.emit("transfer", direction="to backend", bytes=tensor.nbytes)
    return backend.placeholder(type_).set(backend.to_data(tensor))


def _received(backend: Backend, data: Data) -> Data:
    """The backend's data for data of another device, or of a backend that is gone."""
    with _moving:
        sender, value = data.backend, data.value
    if sender is _HOST or type(backend).receive is Backend.receive:
        return _transfer(backend, _read(data).to(backend.device), data.type)
    events.emit("transfer", direction="between devices", bytes=data.type.nbytes)
    return backend.placeholder(data.type).set(backend.receive(value, sender))


def opaque_results(
    backend: Backend,
    outputs: Sequence[Value],
    results: Sequence[Any],
    inputs: Sequence[Data | None],
    rewritten: Mapping[int, Data],
) -> list[torch.Tensor]:
    """Stand-ins for what a program gave, and for the inputs that it has overwritten instead (`rewritten`, by output).

    A result may be an input again, or another result: such data must not be overwritten while both are there.
    """
    known = {_identity(data.value): data for data in inputs if data is not None}
    made = []
    for k, (value, result) in enumerate(zip(outputs, results, strict=True)):
        data = backend.placeholder(value.type)
        written = rewritten.get(k)
        if written is not None:
            data.assign(written)
        elif result is None:
            raise BackendError(f"result {k} is None")
        else:
            same = known.setdefault(_identity(result), data.set(result))
            if same is not data:
                data.handle = same.handle
                _shared.update((data, same))
        made.append(_stand_in(data))
    return made


def _identity(value: Any) -> Any:
    """What two names of the same data have in common: equal if they are plain keys, else the object itself."""
    return (type(value), value) if isinstance(value, int | str | bytes) else id(value)
