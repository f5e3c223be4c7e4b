"""Which backend: by name, by instance or as a torch.compile backend, and the best that works here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tarry.backends import registry
from tarry.backends.base import Backend
from tarry.errors import BackendError


def default_name(device: str | None) -> str:
    """The name of the best backend that works on a device. Warns if a better one does not."""
    name, why_not = registry.default(device or "cpu")
    if why_not:
        warnings.warn(f"tarry: {why_not}; using backend {name!r}.", stacklevel=3)
    return name


def is_importing_torch() -> bool:
    """Whether a module of torch's compilers is being imported right now, by any thread."""
    modules = [sys.modules.get(name) for name in ("torch._inductor", "torch._inductor.compile_fx", "torch._dynamo")]
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)


def instance(backend: str | Backend | Callable[..., Any], device: str | None) -> Backend:
    """The backend that is meant, on a device that it runs on."""
    if isinstance(backend, str):
        factory = registry.find(backend)
        made = factory() if device is None else factory(device=device)
        if not isinstance(made, Backend):
            raise BackendError(f"backend {backend!r}: its factory gave {made!r}, which is not a tarry.Backend")
    elif isinstance(backend, Backend):
        made = backend
    elif callable(backend) and not isinstance(backend, type):
        made = registry.adapt(backend, **({} if device is None else {"device": device}))
    else:
        raise BackendError(
            f"tarry.set_backend takes a name, a tarry.Backend instance or a torch.compile backend, not {backend!r}"
        )
    devices = tuple(made.devices())
    if not devices or not all(isinstance(one, Backend) for one in devices):
        raise BackendError(
            f"backend {made.name!r}: devices() gives a tarry.Backend for each device, one at least, not {devices!r}"
        )
    for name in [one.device for one in devices] if device is None else [device]:
        kinds = made.capabilities.device_types
        try:
            real = torch.device(name)
        except RuntimeError:
            real = None
        if real is None or real.type not in kinds:
            raise BackendError(f"backend {made.name!r} does not run on {str(name)!r}; it runs on {', '.join(kinds)}")
        if real.type == "cuda" and not torch.cuda.is_available():
            raise BackendError(f"backend {made.name!r}: there is no CUDA device here; use device='cpu'")
    return made
