"""`torch.cuda.Event` of a program that measures itself."""

from __future__ import annotations

import time
from typing import Any

import torch


class Event:
    """An event that is recorded when all before it is computed, so that the time between two is that of the work."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timed = enable_timing
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        if self._timed:
            torch.get_device_module("tarry").synchronize()
        self._time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        if not (self._timed and end._timed) or self._time is None or end._time is None:
            raise RuntimeError("both events must be made with enable_timing=True, and recorded")
        return (end._time - self._time) * 1e3

    def synchronize(self) -> None:
        torch.get_device_module("tarry").synchronize()

    def wait(self, stream: Any = None) -> None:
        """There is one stream, in the order of the program."""

    def query(self) -> bool:
        return True
