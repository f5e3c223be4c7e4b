"""Process groups as recorded collectives know them, and the collectives that each still has to run or to wait for.

A collective that has begun is *outstanding* until `wait(ticket)`: meanwhile, others write its tensors.

Private names of torch: `distributed_c10d._get_default_store`, `ProcessGroup._get_backend` (2.11 and 2.13).
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tarry import events
from tarry.distributed.agreement import Agreement, Begun, Call
from tarry.distributed.watch import Awaited, Watch, reason_of
from tarry.errors import CollectiveError

_tickets = itertools.count(1)


@dataclass
class _State:
    groups: dict[str, Group] = field(default_factory=dict)  # by name, in the order of first use
    orders: dict[torch.device, Tensor] = field(default_factory=dict)
    outstanding: dict[float, Outstanding] = field(default_factory=dict)  # by ticket
    begun: dict[str, int] = field(default_factory=dict)  # collectives, by PyTorch's name of their group
    on_host: dict[str, Watch | None] = field(default_factory=dict)  # by PyTorch's name of the group
    leave: Callable[[float], bool] = lambda ticket: False
    """Whether a collective may be left outstanding: what runs it will wait for it."""


_state = _State()
_thread = threading.local()


class Group:
    """A process group that has collectives recorded. Its name counts the groups of this process in the order of their
    first use: in a program that is the same on all ranks, names are, too, whatever PyTorch calls the groups."""

    def __init__(self, name: str, process_group: dist.ProcessGroup) -> None:
        self.name = name
        self.process_group = process_group
        self._agreement = Agreement(process_group, _state.begun)

    def record(self, what: str, place: str) -> float:
        """Note a collective that is about to be recorded: its ticket."""
        _thread.records = True
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

    def run(self, ticket: float, start: Callable[[], Started]) -> None:
        """Start the collective of this ticket, once the ranks agree on it; wait for it, unless that is done later."""
        began = perf_counter()
        call = self._agreement.calls.get(ticket)
        _thread.running = True
        try:
            begun = self._agreement.begin(ticket)
            started = start()
        except Exception as error:
            raise self._agreement.failed(ticket, call, error) from error
        finally:
            _thread.running = False
        _state.outstanding[ticket] = Outstanding(self._agreement, ticket, begun, started, began, perf_counter())
        if not _state.leave(ticket):
            wait(ticket)

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


class Started(NamedTuple):
    """A collective under way: what to wait for, the tensors that it reads and writes, and what to do when it is
    done."""

    work: Any
    tensors: Sequence[Tensor]
    finish: Callable[[], None] = lambda: None


@dataclass
class Outstanding:
    """A collective that was started and has not been waited for. It keeps its tensors."""

    agreement: Agreement
    ticket: float
    begun: Begun
    started: Started
    began: float  # when it was its turn
    left: float  # when it was under way

    def wait(self) -> None:
        began = perf_counter()
        work, tensors, finish = self.started
        try:
            if tensors[0].device.type == "cuda":
                work.wait()  # has the device wait: the host goes on
            else:
                self.agreement.wait(work, self.begun)
            finish()
        except Exception as error:
            raise self.agreement.failed(self.ticket, self.begun.call, error) from error
        file, _, line = self.begun.call.place.rpartition(":")
        end = perf_counter()
        events.emit(
            "collective",
            op=self.begun.call.what,
            bytes=max(tensor.nbytes for tensor in tensors),
            ranks=self.agreement.size,
            reason="its result is read, or the step ends",
            start=self.began,
            wait_seconds=end - began,
            seconds=end - began + self.left - self.began,
            file=file,
            line=int(line),
        )


def wait(ticket: float) -> None:
    """Wait for an outstanding collective: what it writes has its contents afterwards."""
    _state.outstanding.pop(ticket).wait()


def install(leave: Callable[[float], bool]) -> None:
    """Give what says whether a collective may be left outstanding (csrc/execute/outstanding.h)."""
    _state.leave = leave


def group_of(process_group: dist.ProcessGroup) -> Group:
    for group in _state.groups.values():
        if group.process_group is process_group or group.process_group.group_name == process_group.group_name:
            return group
    name = str(len(_state.groups))
    return _state.groups.setdefault(name, Group(name, process_group))


class BegunOnHost(NamedTuple):
    """A collective on tensors of the CPU that this rank has begun."""

    watch: Watch
    awaited: Awaited

    def wait(self, work: Any) -> None:
        try:
            self.watch.wait(work, self.awaited, also_begun=False)
        except RuntimeError as error:
            raise CollectiveError(f"{self.awaited.what} failed: {reason_of(error)}") from error


def begin_on_host(process_group: dist.ProcessGroup, what: str, place: Callable[[], str]) -> BegunOnHost | None:
    """Count a collective on tensors of the CPU, in groups that serve the device. Other threads than the main one may
    communicate beside it, as those that save a checkpoint: a rank says what one of them waits for."""
    if process_group.size() == 1 or threading.current_thread() is not threading.main_thread():
        return None
    name = str(process_group.group_name)
    if name not in _state.on_host:
        ranks = dist.get_process_group_ranks(process_group)
        serves = "tarry" in {device.type for device in process_group._device_types}
        _state.on_host[name] = Watch(f"{name}, on the host", ranks, _state.begun) if serves else None
    watch = _state.on_host[name]
    return BegunOnHost(watch, watch.begin(f"{what} at {place()}")) if watch else None


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


def of_other_threads() -> bool:
    """Whether the pending collectives are none of this thread's, as in one that saves a checkpoint beside the program:
    the program may wait for it on another rank, and begin no step meanwhile. So it must not begin one here."""
    records = getattr(_thread, "records", False) or threading.current_thread() is threading.main_thread()
    return not records and has_pending()


def running() -> bool:
    """Whether a recorded collective runs on this thread."""
    return getattr(_thread, "running", False)


def forget_groups() -> None:
    """Groups were destroyed: what was recorded for them cannot run any more."""
    _state.groups.clear()
    _state.orders.clear()
    _state.outstanding.clear()
    _state.begun.clear()
    _state.on_host.clear()
