"""What a recorded call did, in a form that can be compared with another call and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tarry.ir.graph import typed
from tarry.native import C
from tarry.pytree import TreeSpec, tree_flatten
from tarry.replay.comparison import Comparison, Deviation, Recorded
from tarry.replay.reasons import NotReplayableError, where

StorageRef: TypeAlias = tuple[str, int]
"""Where a storage comes from at a replay; see `Replay::From` in csrc/replay/replay.h."""
Made: TypeAlias = tuple[StorageRef, torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""A tensor that each replay makes anew: its storage, dtype, sizes, strides and offset."""


def flatten_result(result: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of what a call returned. A torch.Size is one: put together again, it would be a tuple."""
    return tree_flatten(result, is_leaf=lambda value: isinstance(value, torch.Size))


@dataclass
class Result:
    """One leaf of what a call returned: how a replay comes by it."""

    kind: str  # "made", "argument", "object", "value"
    value: Any  # made: its number among the made; argument: its index; else the object itself

    def same(self, other: Result) -> bool:
        if self.kind != other.kind:
            return False
        if self.kind == "object":
            return self.value is other.value
        return type(self.value) is type(other.value) and repr(self.value) == repr(other.value)


@dataclass
class Capture:
    """All that a replay of a call would do."""

    snapshot: Any
    sources: list[StorageRef]  # per leaf
    targets: list[StorageRef]  # per root
    kept: list[int]  # serials of storages that outlive the call
    seeds: list[tuple[int, int]]
    draws: int
    made: list[Made]
    gradients: list[tuple[StorageRef, Made | None]]
    holders: list[torch.Tensor]
    hosts: list[torch.Tensor]
    host_identities: list[Any]
    results: list[Result]
    result_tree: TreeSpec
    in_graph: list[bool]  # per result: whether it requires grad
    written: list[torch.Tensor]

    def difference(self, before: Capture, *, numbers: bool = True) -> Deviation | None:
        """What this call did otherwise than an earlier one; None if they did the same. Without `numbers`, those that
        operators were given may be others."""
        theirs, mine = before._roots(), self._roots()
        for ref in theirs.keys() ^ mine.keys():
            capture, verb = (self, "writes") if ref in mine else (before, "does not write any more")
            root = (mine if ref in mine else theirs)[ref]
            return Deviation(f"it {verb} a tensor that was computed at {where(capture.snapshot.root_location(root))}")
        numbered: dict[Any, int] = {}
        sources = before._numbered_sources(numbered), self._numbered_sources(numbered)
        if theirs != mine or sources[0] != sources[1] or not self._recorded_the_same(before, numbers):
            was = Recorded(before.snapshot, sources[0], list(theirs.values()), [drawn for _, drawn in before.seeds])
            now = Recorded(self.snapshot, sources[1], [mine[k] for k in theirs], [drawn for _, drawn in self.seeds])
            found = Comparison(was, now, numbers).difference()
            if found is not None:
                return found
        if self.draws != before.draws:
            return Deviation(
                f"it drew {before.draws} random seeds and then {self.draws}", None, None, before.draws, self.draws
            )
        if self._gradient_changes() != before._gradient_changes() or self.made != before.made:
            return Deviation("it set other gradients, or returned tensors of other types")
        return self._other_result(before)

    def _recorded_the_same(self, before: Capture, numbers: bool) -> bool:
        """Whether the two calls recorded the same nodes in the same order, as most do. A look at this is quick."""
        mine, theirs = self.snapshot, before.snapshot
        return bool(
            self.seeds == before.seeds
            and mine.type_hashes() == theirs.type_hashes()
            and mine.batch.matches(theirs.batch.structure())
            and (not numbers or list(map(typed, mine.numbers())) == list(map(typed, theirs.numbers())))
        )

    def _other_result(self, before: Capture) -> Deviation | None:
        if self.result_tree != before.result_tree or repr(self.result_tree) != repr(before.result_tree):
            return Deviation("it returned another structure")
        if self.in_graph != before.in_graph:
            return Deviation("it returned a tensor that requires grad where it had returned one that does not")
        for mine, theirs in zip(self.results, before.results, strict=True):
            if not mine.same(theirs):
                return Deviation(
                    f"it returned {theirs.value!r} and then {mine.value!r}: a replay could only return the same again. "
                    f"Return tensors, and read them outside",
                    None,
                    None,
                    theirs.value,
                    mine.value,
                )
        return None

    def _key(self, ref: StorageRef) -> Any:
        """A reference in terms that do not depend on the call."""
        match ref:
            case "kept", k:
                return "kept", self.kept[k]
            case "host", k:
                return "host", self.host_identities[k]
            case "gradient", k:
                return "gradient", id(self.holders[k])
        return ref

    def _roots(self) -> dict[Any, int]:
        """The roots whose storages outlive the call, by what these are."""
        return {self._key(ref): k for k, ref in enumerate(self.targets) if ref[0] != "dropped"}

    def _numbered_sources(self, numbered: dict[Any, int]) -> list[int]:
        return [numbered.setdefault(self._key(ref), len(numbered)) for ref in self.sources]

    def _gradient_changes(self) -> list[Any]:
        return [(id(self.holders[k]) if kind == "kept" else (kind, k), made) for (kind, k), made in self.gradients]

    def replay(self, numbers: Sequence[int] = ()) -> Any:
        """The native object that replays the call. These numbers are given to it at each run."""
        return C.Replay(
            snapshot=self.snapshot,
            sources=self.sources,
            targets=self.targets,
            results=self.made,
            gradients=self.gradients,
            holders=self.holders,
            hosts=self.hosts,
            written=self.written,
            kept=self.kept,
            seeds=self.seeds,
            draws=self.draws,
            numbers=list(numbers),
        )


class CountedOnHostError(NotReplayableError):
    """The call could be replayed if optimizers did not count their steps on the host."""

    def __init__(self, name: str | None, optimizers: list[torch.optim.Optimizer], capture: Capture) -> None:
        super().__init__(
            f"it changes {name}, a tensor on the host, which a replay would not: give the optimizer capturable=True"
        )
        self.optimizers = optimizers
        self.capture = capture
