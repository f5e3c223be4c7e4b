"""What a program with symbolic sizes was compiled under the assumption of, as text that can be stored and checked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_NAMES = {"__builtins__": {}, "math": math, "torch": torch, "max": max, "min": min, "abs": abs, "bool": bool}


class Guards:
    """Conditions on the symbols s0, s1, ... in Python's syntax. They hold for some values of the symbols."""

    def __init__(self, conditions: Sequence[str], symbols: int) -> None:
        self.conditions = list(conditions)
        self.symbols = symbols
        names = ", ".join(f"s{k}" for k in range(symbols))
        every = " and ".join(f"({condition})" for condition in conditions) or "True"
        self._hold = eval(f"lambda {names}: bool({every})", dict(_NAMES))  # as much code as the program they belong to
        self._known: dict[tuple[int, ...], bool] = {}

    def __call__(self, values: Sequence[int]) -> bool:
        key = tuple(values)
        if key not in self._known:
            self._known[key] = self._hold(*key)
        return self._known[key]
