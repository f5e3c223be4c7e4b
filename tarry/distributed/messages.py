"""Messages from rank to rank, and barriers: not recorded. They compute what is pending, and the host communicates.

Another process waits for a message, and often this one waits for its answer: recorded, it would stay here until a
value is read.

Private names of torch: `Work.unbox` and `boxed` (2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def on_host(name: str) -> Callable[..., Any]:
    """A kernel that calls the CPU's. What is recorded runs first, as before every call on the CPU."""
    operator = getattr(torch.ops.c10d, name).default

    def kernel(*args: Any) -> Any:
        return operator(*[arg.cpu() if isinstance(arg, Tensor) else arg for arg in args])

    return kernel


def send(tensors: list[Tensor], group: Any, destination: int, tag: int) -> Any:
    return torch.ops.c10d.send([tensor.detach().cpu().contiguous() for tensor in tensors], group, destination, tag)


class ReceiveWork(dist.Work):
    """A message on its way: the tensors have its contents after `wait()`."""

    def __init__(self, work: Any, tensors: list[Tensor], host: list[Tensor], done: Callable[[Any], None]) -> None:
        super().__init__()
        self.work, self.tensors, self.host, self.done = work, tensors, host, done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.tensors:
            self.work.wait(timeout) if timeout else self.work.wait()
            with torch.no_grad():
                for tensor, content in zip(self.tensors, self.host, strict=True):
                    tensor.data.copy_(content)
            self.tensors = []
            self.done(self)
        return True

    def is_completed(self) -> bool:
        return not self.tensors or bool(self.work.is_completed())

    def _source_rank(self) -> int:
        return int(self.work._source_rank())

    source_rank = _source_rank


class Receiver:
    """Receives messages. It keeps each until `wait()`: PyTorch holds the part of it that is C++, not the one here."""

    def __init__(self) -> None:
        self._pending: set[ReceiveWork] = set()

    def kernel(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.c10d, name).default

        def receive(tensors: list[Tensor], *args: Any) -> Any:
            host = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
            work = ReceiveWork(dist.Work.unbox(operator(host, *args)), list(tensors), host, self._pending.discard)
            self._pending.add(work)
            return work.boxed()

        return receive
