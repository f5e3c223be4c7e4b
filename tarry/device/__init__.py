"""What makes `device="tarry"` an ordinary PyTorch device, seen from Python.

The recorder teaches PyTorch's dispatcher about the device; everything a user touches around it is here: `torch.tarry`
(seeds, current device, memory), printing, what happens around `optimizer.step()`, the marking of recomputation in
activation checkpointing, and what PyTorch's compiler does with graphs on it. Each part that leans on a private name of
PyTorch has a file of its own that says which.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from tarry.device import checkpoint, exchange, module, parallel, pickling, printing, sending, storages

NAME = "tarry"


def install(is_portable: Callable[[], bool]) -> None:
    """Register the device under its name. `is_portable`: whether files of tensors are to be loaded without tarry."""
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    printing.install()
    pickling.install(is_portable)
    sending.install()
    storages.install()
    exchange.install()
    parallel.install()
    checkpoint.install()
