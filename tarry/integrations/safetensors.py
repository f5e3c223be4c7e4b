"""`safetensors.torch.load_file(path, device="tarry")`: its list of devices is closed; tensors are read, then moved."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from tarry.integrations.after_import import after_import


def install() -> None:
    """Make the device known wherever safetensors is, or will be, imported."""
    after_import("safetensors", _open)


def _open(module: Any) -> None:
    original = module.safe_open

    @functools.wraps(original)
    def safe_open(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        if framework not in ("pt", "torch", "pytorch") or not str(device).startswith("tarry"):
            return original(filename, framework, device, **options)
        return _Opened(original(filename, framework, "cpu", **options), torch.device(device))

    for user in tuple(sys.modules.values()):  # those that have it by `from safetensors import safe_open`, too
        if getattr(user, "__dict__", {}).get("safe_open") is original:
            user.__dict__["safe_open"] = safe_open


class _Opened:
    """An open file whose tensors come out on a device."""

    def __init__(self, file: Any, device: torch.device) -> None:
        self._file, self._device = file, device

    def __enter__(self) -> _Opened:
        self._file.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.__exit__(*exc_info)

    def __getattr__(self, name: str) -> Any:  # keys, metadata, ...
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name).to(self._device)

    def get_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        tensors = self._file.get_tensors(*args, **kwargs)
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._file.get_slice(name), self._device)


class _Slice:
    """A tensor of an open file, of which indexing reads a part."""

    def __init__(self, part: Any, device: torch.device) -> None:
        self._part, self._device = part, device

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._part[index].to(self._device)

    def __getattr__(self, name: str) -> Any:  # get_shape, get_dtype
        return getattr(self._part, name)
