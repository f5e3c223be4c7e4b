"""The ways of running a program that are compared, and how each is started, cut and waited for."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


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
    """tarry, on a given real device and backend; "default" is what it chooses by itself."""

    device = "tarry"

    def __init__(self, backend: str, device: str, name: str = "tarry") -> None:
        self.name = name
        self._backend = backend
        self._real_device = device

    def start(self) -> None:
        import tarry

        tarry.set_backend(None if self._backend == "default" else self._backend, self._real_device)

    def cut(self) -> None:
        import tarry

        tarry.mark_step(wait=True)


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
