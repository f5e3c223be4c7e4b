"""Process groups as recorded collectives know them, and the collectives that each still has to run.

Private names of torch: `distributed_c10d._get_default_store`, `ProcessGroup._get_backend` (2.11 and 2.13).
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tarry.distributed.agreement import Agreement, Call

_tickets = itertools.count(1)


@dataclass
class _State:
    groups: dict[str, Group] = field(default_factory=dict)  # by name, in the order of first use
    orders: dict[torch.device, Tensor] = field(default_factory=dict)


_state = _State()
_thread = threading.local()


class Group:
    """A process group that has collectives recorded. Its name counts the groups of this process in the order of their
    first use: in a program that is the same on all ranks, names are, too, whatever PyTorch calls the groups."""

    def __init__(self, name: str, process_group: dist.ProcessGroup) -> None:
        self.name = name
        self.process_group = process_group
        self._agreement = Agreement(name, process_group)

    def record(self, what: str, place: str) -> float:
        """Note a collective that is about to be recorded: its ticket."""
        ticket = float(next(_tickets))
        digest = hashlib.blake2b(what.encode(), digest_size=7).digest()
        self._agreement.calls[ticket] = Call(what, place, int.from_bytes(digest, "little"))
        return ticket

    def withdraw(self, ticket: float) -> None:
        """A collective was not recorded after all."""
        self._agreement.calls.pop(ticket, None)

    @property
    def pending(self) -> bool:
        """Whether something was recorded and has not run."""
        return bool(self._agreement.calls)

    @contextmanager
    def turn(self, ticket: float) -> Iterator[None]:
        """The collective of this ticket runs in the block, once the ranks agree on it."""
        _thread.running = True
        try:
            self._agreement.begin(ticket)
            yield
        except Exception as error:
            raise self._agreement.failed(ticket, error) from error
        finally:
            _thread.running = False

    def finish(self, work: Any) -> None:
        self._agreement.wait(work)

    def reachable(self, tensor: Tensor) -> Tensor:
        """The tensor's contents, contiguous, on a device that the group's backends communicate from."""
        kept = tensor.contiguous()
        return kept if tensor.device.type == "cpu" or self._reaches(tensor.device) else kept.cpu()

    def _reaches(self, device: torch.device) -> bool:
        try:
            self.process_group._get_backend(device)
        except RuntimeError:
            return False
        return True


def group_of(process_group: dist.ProcessGroup) -> Group:
    for group in _state.groups.values():
        if group.process_group is process_group or group.process_group.group_name == process_group.group_name:
            return group
    name = str(len(_state.groups))
    return _state.groups.setdefault(name, Group(name, process_group))


def find_group(name: str) -> Group:
    if name not in _state.groups:
        raise RuntimeError(
            "a recorded collective belongs to a process group that was destroyed. Read its result, or call "
            "tarry.sync(), before destroy_process_group()."
        )
    return _state.groups[name]


def order_of(device: torch.device) -> Tensor:
    """The tensor that all collectives of a device write."""
    if device not in _state.orders:
        _state.orders[device] = torch.zeros(1, dtype=torch.int64, device=device)
    return _state.orders[device]


def has_pending() -> bool:
    return any(group.pending for group in _state.groups.values())


def running() -> bool:
    """Whether a recorded collective runs on this thread."""
    return getattr(_thread, "running", False)


def forget_groups() -> None:
    """Groups were destroyed: what was recorded for them cannot run any more."""
    _state.groups.clear()
    _state.orders.clear()
