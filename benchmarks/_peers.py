"""The ways of running a program that are compared, and how each is started, cut and waited for."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class Peer(ABC):
    """One way of running a PyTorch program: where its tensors live, and how a step ends."""

    name: str
    device: str
    lazy = True  # whether operators are recorded, so that a sync is something to measure

    @abstractmethod
    def start(self) -> None:
        """Make the device usable; raises if it is not."""

    @abstractmethod
    def cut(self) -> None:
        """Launch everything that is pending and wait for it."""

    def end_step(self) -> None:  # noqa: B027 - only LTC needs it
        """What a training loop must call after `optimizer.step()`."""

    def ready(self, timeout: float | None = None) -> None:  # noqa: B027 - only tarry compiles in the background
        """Wait until what has been compiled for the steps so far is in use, for some seconds at most."""


class Eager(Peer):
    """Plain PyTorch."""

    name = "eager"
    lazy = False

    def __init__(self, device: str) -> None:
        self.device = device

    def start(self) -> None:
        torch.empty(1, device=self.device)

    def cut(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


class Compiled(Eager):
    """torch.compile on the model, with its default backend or in one of its modes; or, in the mode "regional", on each
    of its repeated blocks, as PyTorch's documentation advises where compiling takes too long."""

    name = "compile"

    def __init__(self, device: str, mode: str | None = None) -> None:
        super().__init__(device)
        self.mode = mode
        if mode is not None:
            self.name = f"compile {mode}"

    def wrap(self, model: nn.Module) -> Any:
        if self.mode != "regional":
            return torch.compile(model, mode=self.mode)
        for blocks in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
            for block in blocks:
                block.compile()
        return model


class LazyTensorCore(Peer):
    """PyTorch's own lazy tensors, with the TorchScript backend."""

    name = "LTC"
    device = "lazy"

    def start(self) -> None:
        import torch._lazy.ts_backend

        torch._lazy.ts_backend.init()

    def cut(self) -> None:
        torch._lazy.mark_step(wait=True)

    def end_step(self) -> None:
        torch._lazy.mark_step()


class Tarry(Peer):
    """tarry, on a given real device and backend (None: the one that a user gets who chooses none)."""

    device = "tarry"

    def __init__(self, backend: str | None, device: str, name: str = "tarry") -> None:
        self.name = name
        self._backend = backend
        self._real_device = device

    def start(self) -> None:
        import tarry

        tarry.set_backend(None if self._backend == "default" else self._backend, self._real_device)

    def cut(self) -> None:
        import tarry

        tarry.mark_step(wait=True)

    def ready(self, timeout: float | None = None) -> None:
        import tarry

        tarry.wait_for_compiles(timeout)


class Replayed(Tarry):
    """tarry.compile on the step function: a step that has proved stable is replayed without its Python."""

    def __init__(self, backend: str | None, device: str) -> None:
        super().__init__(backend, device, name="tarry.compile")

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        import tarry

        return tarry.compile(step)


def named(name: str, device: str) -> Peer:
    """The peer that a table calls by this name."""
    if name.startswith("compile"):
        return Compiled(device, name.removeprefix("compile").strip() or None)
    if name == "tarry.compile":
        return Replayed("inductor", device)
    if name.startswith("tarry"):
        return Tarry(name.removeprefix("tarry").strip() or None, device, name=name)
    return LazyTensorCore() if name == "LTC" else Eager(device)


def started(peers: Sequence[Peer]) -> list[Peer]:
    """The peers that can run here; a missing one is named on standard error and left out."""
    usable = []
    for peer in peers:
        try:
            peer.start()
        except Exception as error:  # a benchmark without one of its columns is still worth having
            print(f"{peer.name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            usable.append(peer)
    return usable
