"""PyTorch built for CUDA, on a machine without a GPU: compiling on a thread that ends.

Entering FakeTensorMode there sets a device guard for CUDA that belongs to the thread. torch 2.11 goes on to use it when
the thread has ended, and crashes in the next FakeTensorMode; 2.13 without CUDA and 2.15 do not. Graphs are compiled on
threads of their own, so the guard is set once, on a thread that does not end.

Private to torch: torch._C._ensureCUDADeviceGuardSet, which FakeTensorMode calls (2.11 to 2.15).
"""

from __future__ import annotations

import functools
import threading

import torch


@functools.cache
def keep_device_guard() -> None:
    """Set the guard for the life of the process."""
    name = "_ensureCUDADeviceGuardSet"
    ensure = getattr(torch._C, name, None)
    if ensure is None or torch.version.cuda is None or torch.cuda.is_available():
        return
    is_set = threading.Event()

    def stay() -> None:
        ensure()
        is_set.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="tarry-device-guard", daemon=True).start()
    is_set.wait()
    setattr(torch._C, name, lambda: None)
