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
_shared: set[int] = set()  # handles of data that more than one tensor may see
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


def ordinal_of(backend: Backend, device: int) -> int:
    """Which of the backend's devices is behind tarry:device. If we have more than it has, its last serves the rest."""
    return min(device, len(backend.devices()) - 1)


def real_device(backend: Backend, device: int) -> torch.device:
    """The real device behind tarry:device."""
    return torch.device(backend.devices()[ordinal_of(backend, device)])


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


def _read(data: Data) -> torch.Tensor:
    with _moving:
        backend, value = data.backend, data.value
    return as_typed(backend.to_tensor(value), data.type, lambda: f"backend {backend.name!r}: to_tensor(data)")


def evacuate(backend: Backend) -> None:
    """Make tensors of all that a backend holds: it is about to go."""
    for data in list(_stand_ins):
        if data.backend is backend and data.has_value:
            value: torch.Tensor | Exception
            try:
                with PlainDispatch():
                    value = _read(data).clone()  # the backend's own memory goes with it
            except Exception as error:
                value = error
            with _moving:
                data.backend, data.value = _HOST, value
    for data in list(_copies):
        if data.backend is backend:
            with _moving:
                data.backend, data.value, data.has_value = _HOST, None, False


# ---- a step's inputs and results


def opaque_inputs(backend: Backend, batch: Batch, inputs: Sequence[Value], update: Sequence[int]) -> list[Data]:
    """The backend's data for the inputs. Those at the positions in `update` belong to the step alone, for it
    will overwrite them."""
    given: list[Data] = []
    device = real_device(backend, batch.device)
    tensors: list[Any] = batch.own_inputs()
    for position, value in enumerate(inputs):
        if tensors[position] is None:  # nothing reads it
            tensors[position] = empty(value.type, device)
        tensor = tensors[position]
        data: Data | None = getattr(tensor, "_tarry_data", None)
        if data is None or data.backend is not backend or not data.has_value:
            real = tensor if data is None or not tensor.is_meta else _read(data)
            data = _transfer(backend, real.to(device), value.type)
            tensor._tarry_data = data
            (_stand_ins if tensor.is_meta else _copies).add(data)
        given.append(data)
    for position in update:
        data, tensor = given[position], tensors[position]
        # The leaf of the graph and the Python object at hand know the tensor: another owner would see the write.
        if data.handle in _shared or tensor._use_count() > 2:
            given[position] = _transfer(backend, _read(data).clone(), data.type)
    return given


def _transfer(backend: Backend, tensor: torch.Tensor, type_: TensorType) -> Data:
    events.emit("transfer", direction="to backend", bytes=tensor.nbytes)
    return backend.placeholder(type_).set(backend.to_data(tensor))


def opaque_results(
    backend: Backend,
    outputs: Sequence[Value],
    results: Sequence[Any],
    inputs: Sequence[Data],
    rewritten: Mapping[int, Data],
) -> list[torch.Tensor]:
    """Stand-ins for what a program gave, and for the inputs that it has overwritten instead (`rewritten`, by output).

    A result may be an input again, or another result: such data must not be overwritten while both are there.
    """
    known = {_identity(data.value): data for data in inputs}
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
                _shared.add(data.handle)
        made.append(_stand_in(data))
    return made


def _identity(value: Any) -> Any:
    """What two names of the same data have in common: equal if they are plain keys, else the object itself."""
    return (type(value), value) if isinstance(value, int | str | bytes) else id(value)
