"""A rank that waits for others says so, and looks what they are doing, so that no rank waits for one that cannot come.

A rank that waits longer than a second says in the store what it waits for, and reads what the others have said. Its
wait ends with an error if one of them has failed, or waits for something that this rank has not begun, and has not
begun what this rank waits for. A rank that says nothing is late, and is waited for.

What ranks wait for is counted by *kind*: the recorded collectives of a group, and those of its members' hosts.

Private name of torch: `distributed_c10d._get_default_store` (2.11 and 2.13).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tarry.errors import CollectiveError

SLICE = timedelta(seconds=1)
"""How long a rank waits before it looks what the others are doing: longer than steps of small models, short for a
person."""


@dataclass(frozen=True)
class Awaited:
    """What a rank waits for: in words, and the how manyth of its kind."""

    what: str
    position: int


class Watch:
    """Of one kind of communication, among some ranks."""

    def __init__(self, kind: str, ranks: Sequence[int], begun: dict[str, int]) -> None:
        """`begun`: how many of each kind this rank has begun; all ranks have the same names for kinds."""
        self.kind, self.ranks = kind, list(ranks)
        self._begun = begun

    def begin(self, what: str) -> Awaited:
        """Count one more. Whoever waits for it will not be told that this rank has not come."""
        position = self._begun.get(self.kind, 0)
        self._begun[self.kind] = position + 1
        return Awaited(what, position)

    def fail(self, reason: str) -> None:
        """Say that this rank has failed, to those that wait for it."""
        self._tell({"failed": reason, "kind": self.kind, "begun": self._begun})

    def recover(self) -> None:
        """Ranks that had failed have found together again."""
        self._tell({})

    def wait(self, work: Any, awaited: Awaited, *, also_begun: bool) -> None:
        """Wait for communication, and find out what is wrong if it does not end. `also_begun`: whether failures count
        in what this rank has begun, too; it may have been told of them otherwise."""
        ticks = 0
        seen: dict[int, Any] = {}
        while not _done_within_slice(work):
            ticks += 1
            place = {"ranks": self.ranks, "kind": self.kind, "position": awaited.position}
            self._tell({"waits": awaited.what, **place, "begun": self._begun, "ticks": ticks})
            seen = self._look_around(awaited, seen, lambda status: also_begun or self._is_news(status))
        if ticks:
            self._tell({})

    def _tell(self, status: dict[str, Any]) -> None:
        with suppress(Exception):  # the store may have gone with its rank: the error at hand says so
            distributed_c10d._get_default_store().set(f"tarry/status/{dist.get_rank()}", json.dumps(status))

    def _is_news(self, status: dict[str, Any]) -> bool:
        """Whether a rank has failed in something that this rank has not begun."""
        kind = status["kind"]
        return bool(status["begun"].get(kind, 0) > self._begun.get(kind, 0))

    def _look_around(
        self, awaited: Awaited, before: dict[int, Any], counts: Callable[[dict[str, Any]], bool]
    ) -> dict[int, Any]:
        """What the other ranks say. Raises if one that this rank waits for cannot come: it has failed; or it has waited
        since the last time, and before, for something that this rank has not begun."""
        me = dist.get_rank()
        statuses = {rank: self._status(rank) for rank in self.ranks if rank != me}
        for rank, status in statuses.items():
            if "failed" in status and counts(status):
                raise CollectiveError(f"rank {rank}, which it waits for, has failed:\n  {status['failed']}")
            if self._waits_elsewhere(status, awaited, me) and status.get("ticks", 0) > before.get(rank, {}).get(
                "ticks", 1 << 62
            ):
                raise CollectiveError(
                    "two ranks wait for each other.\n"
                    f"  rank {me}: {awaited.what} (group {self.kind})\n"
                    f"  rank {rank}: {status['waits']} (group {status['kind']})\n"
                    "Every rank must call the same collectives in the same order."
                )
        return statuses

    def _waits_elsewhere(self, status: dict[str, Any], awaited: Awaited, me: int) -> bool:
        """Whether a rank waits for this one, and each of the two has not begun what the other one waits for. Several
        collectives may be outstanding: a rank that waits for an earlier one will come."""
        if "waits" not in status or me not in status["ranks"]:
            return False
        they_came = status["begun"].get(self.kind, 0) > awaited.position
        we_came = self._begun.get(status["kind"], 0) > status["position"]
        return not they_came and not we_came

    def _status(self, rank: int) -> dict[str, Any]:
        store = distributed_c10d._get_default_store()
        key = f"tarry/status/{rank}"
        try:
            return dict(json.loads(store.get(key))) if store.check([key]) else {}
        except RuntimeError as error:
            raise CollectiveError(f"the store of the process groups is gone: {error}") from error


def _done_within_slice(work: Any) -> bool:
    since = monotonic()
    try:
        work.wait(SLICE)
    except RuntimeError:
        # Not all works that failed say that they are completed: gloo's reduce_scatter never does.
        if work.is_completed() or monotonic() - since < SLICE.total_seconds() / 2:
            raise
        return False
    return True


def reason_of(error: Exception) -> str:
    """Why communication failed, for a person. What gloo says of a rank that has ended is about a connection."""
    text = str(error) if isinstance(error, CollectiveError) else f"{type(error).__name__}: {error}"
    if isinstance(error, RuntimeError) and "onnection" in text and ("peer" in text or "refused" in text):
        return f"another rank has ended, or is out of reach: look at what it has printed. ({text})"
    return text
