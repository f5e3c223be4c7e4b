"""From the IR to an FX graph of ATen operators, for every compiler that takes one."""

from __future__ import annotations

from tarry.backends.fx.lower import FxProgram, NumberVector, Signature, lower
from tarry.backends.fx.numbers import takes_number

__all__ = ["FxProgram", "NumberVector", "Signature", "lower", "takes_number"]
