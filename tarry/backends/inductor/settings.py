"""What besides the graph decides the code that Inductor generates: the machine, and settings of the process."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from contextvars import ContextVar
from typing import Any

import torch

# Inductor's configuration is read without importing it: a process that has not imported it has not changed it. How it
# keeps what a user has changed was read off torch 2.11 and 2.13.

_UNSET = object()
_NO_MATTER = frozenset(
    {
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCHINDUCTOR_FX_GRAPH_CACHE",
        "TORCHINDUCTOR_WORKER_START",
    }
)


def settings() -> dict[str, Any]:
    """Settings of this process, which another one can be given (`apply_settings`)."""
    return {
        "threads": torch.get_num_threads(),  # the number stands in the code of a loop
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "changed": _changed(),
    }


def apply_settings(given: dict[str, Any]) -> None:
    """Have the settings of another process."""
    torch.set_num_threads(given["threads"])
    torch.use_deterministic_algorithms(given["deterministic"], warn_only=given["warn_only"])
    torch.set_float32_matmul_precision(given["matmul_precision"])
    torch.set_default_dtype(getattr(torch, given["default_dtype"]))
    if settings()["mkldnn"] != given["mkldnn"]:
        torch.backends.mkldnn.enabled = given["mkldnn"]
    if given["changed"]:
        from torch._inductor import config

        for name, value in given["changed"].items():
            setattr(config, name, value)


def fingerprint(device: str, options: dict[str, Any]) -> str:
    """All of it as text, the same in every process in which Inductor would generate the same code."""
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name == "CXX" or (name.startswith(("TORCHINDUCTOR_", "TRITON_")) and name not in _NO_MATTER)
    }
    found = {"options": options, **settings(), "environment": environment, "machine": _machine(device)}
    return json.dumps(found, sort_keys=True, default=repr)


def is_json(value: Any) -> bool:
    """Whether a value is the same after a journey as JSON."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _changed() -> dict[str, Any]:
    config = sys.modules.get("torch._inductor.config")
    found = {}
    for name, entry in getattr(config, "_config", {}).items():
        held = getattr(entry, "user_override", _UNSET)
        value = held.get() if isinstance(held, ContextVar) else held
        if type(value) is not object and value != entry.default:  # a plain object marks what is not set
            found[name] = value
    return found


@functools.cache
def _machine(device: str) -> str:
    """What the code is generated for: the processor with its features, or the GPU."""
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name} {properties.major}.{properties.minor} CUDA {torch.version.cuda}"
    try:
        with open("/proc/cpuinfo") as file:
            telling = [line for line in file if line.startswith(("model name", "flags", "Features"))]
    except OSError:
        telling = []
    described = hashlib.sha256("".join(sorted(set(telling))).encode()).hexdigest()
    return f"{torch.backends.cpu.get_cpu_capability()} {described}"
