"""What the TorchScript backend holds for a tensor: a tensor of the real device, or a number that can become one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tarry.backends.base import Data, PythonNumber
from tarry.errors import BackendError


@dataclass(eq=False)
class TSData(Data):
    """A handle to a tensor on the backend's device. One made from a number makes its tensor at the first use.

    The runtime keeps this backend's data as plain tensors; handles are for lowering and for tools.
    """

    scalar: PythonNumber | None = None

    @property
    def data(self) -> torch.Tensor:
        """The tensor."""
        if not self.has_value:
            if self.scalar is None:
                raise BackendError(
                    f"TSData.data: handle {self.handle} to {self.type} has no value; assign() or set() it"
                )
            self.set(self.backend.scalar(self.scalar, self.type.dtype))
        tensor: torch.Tensor = self.value
        return tensor

    def assign(self, other: Data) -> None:
        """Become the same data as another handle of the same type."""
        super().assign(other)
        self.scalar = other.scalar if isinstance(other, TSData) else None
