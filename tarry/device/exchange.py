"""Data exchange with other libraries: DLPack and `__cuda_array_interface__`.

What is handed out is the memory of the real device, with everything computed; it is shared, not copied, until the last
holder lets go (csrc/device/lend.h). `torch.from_dlpack` of a tarry tensor stays on the device. Replaced functions:
`Tensor.__dlpack__`, `__dlpack_device__` and `__cuda_array_interface__`, `torch.from_dlpack`, `torch.to_dlpack` and the
latter two in `torch.utils.dlpack` (2.11 and 2.13). PyTorch's own `__dlpack_device__` compares the type of a device with
"privateuse1", which is not what a renamed device is called; and no library but PyTorch knows what such a device is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import dlpack

from tarry.native import C


def install() -> None:
    """Teach tensors of device tarry; those of other devices do as before."""
    _teach_tensors()
    _teach_functions()


def _teach_tensors() -> None:
    cls: Any = torch.Tensor
    export, export_device, interface = cls.__dlpack__, cls.__dlpack_device__, cls.__cuda_array_interface__

    def __dlpack__(self: Any, **kwargs: Any) -> Any:  # noqa: N807 - the protocol's name
        if self.device.type != "tarry":
            return export(self, **kwargs)
        _check_exportable(self)
        real = C.lend(self)
        if real.device.type != "cuda":
            return export(real, **kwargs)
        torch.cuda.synchronize(real.device)  # the consumer's stream need not wait for ours
        with torch.cuda.device(real.device):
            return export(real, **kwargs)

    def __dlpack_device__(self: Any) -> Any:  # noqa: N807 - likewise
        if self.device.type != "tarry":
            return export_device(self)
        return export_device(torch.empty(0, device=C.real_device(self.device.index)))

    def __cuda_array_interface__(self: Any) -> Any:  # noqa: N807 - likewise
        if self.device.type != "tarry" or torch.device(C.real_device(self.device.index)).type != "cuda":
            return interface.__get__(self)
        if self.requires_grad:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad; use tensor.detach()")
        real = C.lend(self, keep=True)  # the consumer is given an address, and holds on to `self`
        torch.cuda.synchronize(real.device)
        return interface.__get__(real)

    cls.__dlpack__, cls.__dlpack_device__ = __dlpack__, __dlpack_device__
    cls.__cuda_array_interface__ = property(__cuda_array_interface__, doc=interface.__doc__)


def _check_exportable(tensor: torch.Tensor) -> None:
    """As PyTorch does, before the tensor is computed."""
    if tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if tensor.is_conj() or tensor.is_neg():
        raise BufferError(
            "Can't export tensors with the conjugate or negative bit set; call resolve_conj(), resolve_neg()"
        )
    if tensor.layout != torch.strided:
        raise BufferError("Can't export tensors with layout other than torch.strided")


def _teach_functions() -> None:
    take, make = dlpack.from_dlpack, torch._C._to_dlpack

    def from_dlpack(ext_tensor: Any, *, device: Any = None, copy: bool | None = None) -> torch.Tensor:
        target = None if device is None else torch.device(device)
        if isinstance(ext_tensor, torch.Tensor) and ext_tensor.device.type == "tarry":
            _check_exportable(ext_tensor)
            if target is None or torch.empty(0, device=target).device == ext_tensor.device:
                return ext_tensor.clone() if copy else ext_tensor.data
            _check_copy(copy, ext_tensor.device, target)
            return ext_tensor.to(target)
        if target is not None and target.type == "tarry":
            _check_copy(copy, "another library", target)
            return take(ext_tensor).to(target)
        return take(ext_tensor, device=device, copy=copy)

    def to_dlpack(tensor: torch.Tensor, **kwargs: Any) -> Any:
        return tensor.__dlpack__(**kwargs) if tensor.device.type == "tarry" else make(tensor, **kwargs)

    from_dlpack.__doc__, to_dlpack.__doc__ = take.__doc__, make.__doc__
    for module in (torch, dlpack):
        setattr(module, "from_dlpack", from_dlpack)  # noqa: B010 - mypy refuses the assignment
        setattr(module, "to_dlpack", to_dlpack)  # noqa: B010


def _check_copy(copy: bool | None, source: object, target: torch.device) -> None:
    if copy is False:
        raise ValueError(f"cannot move a DLPack tensor from {source} to {target} without copying; set copy=None")
