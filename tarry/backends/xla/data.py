"""Tensors to JAX arrays and back. Both look at the same memory wherever its alignment allows it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import jax
import torch
import torch.utils.dlpack

from tarry.backends.xla.table import Array
from tarry.errors import BackendError

# JAX's own from_dlpack and __dlpack__ cost 30 and 5 microseconds a tensor, in Python; what they call costs 4 and 1. It
# is not public: checked on jax 0.10.2. Where it is missing or differs (jax 0.6), the public functions are used.
try:
    from jax._src.lib import _jax as _native
except ImportError:
    _native = None
_pack: Any = torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined] # not in its __all__
_unpack: Any = torch.utils.dlpack.from_dlpack


def wide_types() -> AbstractContextManager[Any]:
    """Within the block, JAX has 64-bit types: what it computes is what was recorded. Elsewhere it is as it was."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # before jax 0.8

    return enable_x64(True)


def find_device(name: str) -> Any:
    """JAX's device for one of PyTorch's."""
    wanted = torch.device(name)
    if wanted.type == "cuda":
        # Otherwise JAX takes three quarters of the GPU's memory when it starts, which PyTorch needs as well.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        found = jax.devices("cpu" if wanted.type == "cpu" else "gpu")
    except RuntimeError as error:
        raise BackendError(
            f"backend 'xla': this JAX has no device for {name!r} ({error}). For NVIDIA GPUs, install 'jax[cuda12]' or "
            f"'jax[cuda13]', whichever CUDA your torch was built for; or use device='cpu'."
        ) from error
    return found[wanted.index or 0]


class Exchange:
    """Moves data between PyTorch and one device of JAX.

    An array that becomes a tensor hangs on the tensor's storage, and goes when that goes: it need not be made again
    when the tensor comes back in the next step. Both look at the same memory: the array has what PyTorch writes there.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.has_streams = device.platform != "cpu"
        # Where there are streams they have to wait for each other, which JAX's public functions see to.
        self._quick = _native is not None and not self.has_streams and self._works()

    def _works(self) -> bool:
        try:
            probe = torch.arange(4, dtype=torch.float32)
            return torch.equal(self._export(self._import(probe)), probe)
        except Exception:  # another version of JAX: any failure means that it is not what we know
            return False

    def _import(self, tensor: torch.Tensor) -> Array:
        return _native.dlpack_managed_tensor_to_buffer(_pack(tensor), self.device, None, None)

    @staticmethod
    def _export(array: Array) -> Any:
        return _unpack(_native.buffer_to_dlpack_managed_tensor(array, None))

    def to_array(self, tensor: torch.Tensor, key: object) -> Array:
        """The array for a contiguous tensor. `key` stands for its dtype and sizes."""
        kept = tensor.untyped_storage().__dict__.get("_tarry_array")
        if kept is not None and kept[1] == tensor.data_ptr() and kept[2] == key:
            return kept[0]
        return self.imported(tensor)

    def imported(self, tensor: torch.Tensor) -> Array:
        """A new array for a contiguous tensor. A program that takes it waits for what PyTorch has launched by now."""
        return self._import(tensor) if self._quick else jax.dlpack.from_dlpack(tensor)

    def to_tensor(self, array: Array, key: object) -> Any:
        """The tensor for an array, once it is computed. `key` stands for its dtype and sizes."""
        tensor: Any = self._export(array) if self._quick else _unpack(array)
        tensor.untyped_storage()._tarry_array = (array, tensor.data_ptr(), key)
        return tensor
