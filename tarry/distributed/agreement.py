"""Ranks agree on what they are about to do, before they do it.

A collective that one rank calls and another does not - a branch taken on one rank only, a batch more - leaves one
waiting for ever; two different ones that happen to fit give wrong numbers without a word. So before a group runs a
collective, its ranks gather what each has recorded: the fingerprints of its next collectives, as many as it knows.
They compare as far as all of them know, run that much, and gather again. Steps may be cut at different places on
different ranks; what counts is the sequence.

They gather over connections that nothing else uses (the group's backend for tarry, `kernels.py`): a rank that calls
something else meanwhile, as a barrier, must not take these messages for its own. While they wait, `watch.py` looks what
the others are doing. `TARRY_CHECK_COLLECTIVES=0` leaves out the comparison.

Private names of torch: `distributed_c10d._get_default_store`, `ProcessGroup._get_backend` (2.11 and 2.13).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tarry.distributed.watch import Awaited, Watch, reason_of
from tarry.errors import CollectiveError

AHEAD = 63
"""Fingerprints that are compared at once: a few more than a layer of tensor parallelism has, in a message of 512
bytes."""


@dataclass(frozen=True)
class Call:
    """A recorded collective: what it is in words, the user's line, and a fingerprint of the words."""

    what: str
    place: str
    fingerprint: int

    def __str__(self) -> str:
        return f"{self.what} at {self.place}"


@dataclass(frozen=True)
class Begun:
    """A collective whose turn it is, or was: the how manyth of its group."""

    call: Call
    awaited: Awaited


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """How many collectives all ranks have recorded. Each row has a rank's count, then the fingerprints."""
    return min(row[0] for row in rows)


def first_difference(rows: Sequence[Sequence[int]]) -> int | None:
    """The position of the first collective that is not the same on all ranks."""
    for k in range(1, common_length(rows) + 1):
        if any(row[k] != rows[0][k] for row in rows):
            return k - 1
    return None


class Agreement:
    """Of one group: the collectives that this rank has recorded and not run, and how many of them the ranks agree
    on."""

    def __init__(self, process_group: dist.ProcessGroup, begun: dict[str, int]) -> None:
        """`begun`: how many collectives this rank has begun, by the name that PyTorch has for a group on all ranks."""
        self.calls: dict[float, Call] = {}  # by ticket, in order
        self._key = str(process_group.group_name)
        self._rank, self.size = process_group.rank(), process_group.size()
        self._ranks = dist.get_process_group_ranks(process_group)
        self._watch = Watch(self._key, self._ranks, begun)
        self._channel = _channel_of(process_group)
        self._agreed = 0  # calls to come that the ranks have compared
        self._failure: CollectiveError | None = None  # the last one; the other ranks have been told
        self._failures: dict[float, CollectiveError] = {}
        self._checks = (
            self.size > 1 and os.environ.get("TARRY_CHECK_COLLECTIVES", "1") != "0" and self._channel is not None
        )

    def begin(self, ticket: float) -> Begun:
        """The collective of this ticket is next: all ranks are about to run it, or this raises."""
        if ticket in self._failures:
            raise self._failures[ticket]
        if ticket not in self.calls:
            again = "A collective of this step has run, and other ranks would not run it a second time"
            if self._failure is not None:  # of one that came after it
                raise CollectiveError(f"{self._failure}\n{again}. Start all ranks from a checkpoint.")
            raise CollectiveError(f"the program of a step failed. {again}. Start all ranks from a checkpoint.")
        skipped = [earlier for earlier in self.calls if earlier < ticket]
        missing = self.calls[skipped[0]] if skipped else None
        for earlier in skipped:
            del self.calls[earlier]
        if missing and self._agreed:
            raise CollectiveError(f"{missing} did not run, since its step had failed; other ranks wait for it")
        begun = Begun(self.calls[ticket], self._watch.begin(str(self.calls[ticket])))
        if self._checks and not self._agreed:
            self._agreed = self._compare(begun)
            if self._failure is not None:  # the ranks have found together again
                self._failure = None
                self._watch.recover()
        self._agreed = max(0, self._agreed - 1)
        del self.calls[ticket]
        return begun

    def _compare(self, begun: Begun) -> int:
        """How many of the next collectives are the same on all ranks. Raises if the next differs."""
        known = [call.fingerprint for call in list(self.calls.values())[:AHEAD]]
        mine = torch.zeros(1 + AHEAD, dtype=torch.int64)
        mine[: 1 + len(known)] = torch.tensor([len(known), *known])
        rows = torch.zeros(self.size, 1 + AHEAD, dtype=torch.int64)
        self.wait(self._channel.allgather([list(rows.unbind())], [mine]), begun)
        table: list[list[int]] = rows.tolist()
        difference = first_difference(table)
        if difference is None:
            return common_length(table)
        if difference > 0:
            return difference  # the ones before it are the same, and run first
        raise self._divergence(begun)

    # ---- faults

    def _divergence(self, begun: Begun) -> CollectiveError:
        """All ranks come here at once, and say what they were about to do."""
        calls = {rank: self._said("diverged", rank, begun) for rank in range(self.size)}
        lines = [f"  rank {self._ranks[rank]}: {text}" for rank, text in calls.items()]
        return CollectiveError(
            "the ranks of a process group are about to run different collectives:\n" + "\n".join(lines) + "\n"
            "Every rank must call the same collectives in the same order: look for a branch that depends on the rank "
            "or on its data. Nothing was sent."
        )

    def _said(self, kind: str, rank: int, begun: Begun) -> str:
        """What a rank says about the position where this one is; all of them say something within seconds."""
        store = distributed_c10d._get_default_store()
        prefix = f"tarry/{kind}/{self._key}/{begun.awaited.position}"
        store.set(f"{prefix}/{self._rank}", str(begun.call))
        if rank == self._rank:
            return str(begun.call)
        try:
            store.wait([f"{prefix}/{rank}"], timedelta(seconds=10))
            return str(store.get(f"{prefix}/{rank}").decode())
        except RuntimeError:
            return "(it did not say)"

    def failed(self, ticket: float, call: Call | None, error: Exception) -> CollectiveError:
        """The error of a collective that failed. The other ranks get to know it, and it fails again if it is tried
        again."""
        if ticket not in self._failures:
            reason = reason_of(error)
            self._failures[ticket] = CollectiveError(f"{call} failed: {reason}" if call else reason)
            self.calls.pop(ticket, None)
            if call or self._failure is None:
                self._failure = self._failures[ticket]
            self._watch.fail(str(self._failures[ticket]))
        return self._failures[ticket]

    def wait(self, work: Any, begun: Begun) -> None:
        """Wait for communication, and find out what is wrong if it does not end."""
        self._watch.wait(work, begun.awaited, also_begun=True)


def _channel_of(process_group: dist.ProcessGroup) -> Any:
    """What comparisons are sent by, from the host. None if the group has no such backend; or PyTorch's fake one, which
    sends nothing to nobody: whatever this rank does is agreed upon."""
    for device in ("tarry", "cpu"):
        try:
            backend = process_group._get_backend(torch.device(device))
        except RuntimeError:
            continue
        return None if backend.name() == dist.Backend.FAKE else backend
    return None
