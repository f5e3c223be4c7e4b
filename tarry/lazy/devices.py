"""Which device takes the place of which, and in whose calls."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Source = Literal["cuda", "cpu"]
SOURCES = ("cuda", "cpu")

# Modules that mean the real device when they name one: compilers, backends, and what torch does for itself.
_THEMSELVES = ("torch._", "torch.utils._", "torch.fx", "torch.cuda", "torch.testing", "triton", "tarry.")
# The module that moves a tensor to the CPU to read it by its address.
_READS_MEMORY = "safetensors"
# Modules of torch that make tensors for the program. The rest (samplers, an optimizer's step counts) makes
# its own, which are on the host whatever the device is.
_FOR_THE_PROGRAM = ("torch.nn", "torch.distributions")
_NAMES_FOR_THE_PROGRAM = "torch.cuda.amp"  # its classes name the device for the program


@dataclass(frozen=True)
class Devices:
    """`target` takes the place of `source`. Both are kinds of devices; an index goes with the name."""

    source: Source
    target: str = "tarry"
    is_default: bool = field(init=False)
    """Whether the device is meant by calls that name none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_default", self.source == "cpu")

    def replace(self, given: Any) -> Any:
        """The device that takes the place of one given as a string or a `torch.device`; else what was given."""
        if isinstance(given, str):
            kind, colon, index = given.partition(":")
            return given if kind != self.source else self.target + (colon + index if self.target != "cpu" else "")
        if isinstance(given, torch.device) and given.type == self.source:
            return torch.device(self.target) if self.target == "cpu" else torch.device(self.target, given.index)
        return given


def is_left_alone(devices: Devices) -> bool:
    """Whether the caller of the function that asks means the real device."""
    return _means_real_device(sys._getframe(2).f_globals.get("__name__", ""), devices.is_default)


@functools.cache
def _means_real_device(module: object, by_default: bool) -> bool:
    name = str(module)
    if by_default and f"{name}.".startswith("torch.") and not name.startswith(_FOR_THE_PROGRAM):
        return True
    if by_default and name.startswith(_READS_MEMORY):
        return True
    return name.startswith(_THEMSELVES) and not name.startswith(_NAMES_FOR_THE_PROGRAM)
