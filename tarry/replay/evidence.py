"""What a call was seen to do, in a form that can be compared with another call and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import TreeSpec  # private; checked on torch 2.11 and 2.13

from tarry.native import C

Place: TypeAlias = tuple[str, int]
"""Where a storage comes from at a replay; see `Replay::From` in csrc/replay.h."""
Made: TypeAlias = tuple[Place, torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""A tensor that each replay makes anew: its storage, dtype, sizes, strides and offset."""


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
class Number:
    """A number that an operator was given."""

    index: int  # among all numbers of the batch
    value: Any
    op: str
    where: str


@dataclass
class Evidence:
    """All that a replay of a call would do; two calls that agree in it do the same."""

    snapshot: Any
    structure: Any
    places: dict[str, Any]  # plain data, to be compared
    numbers: list[Number]
    results: list[Result]
    result_tree: TreeSpec
    holders: list[torch.Tensor]
    hosts: list[torch.Tensor]
    written: list[torch.Tensor]

    def difference(self, other: Evidence, numbers: bool = True) -> str | None:
        """Why the two calls did not do the same; None if they did."""
        if not self.snapshot.batch.matches(other.structure):
            return "it recorded another graph than in the call before"
        if self.places != other.places:
            return "it read or wrote other tensors than in the call before"
        if self.result_tree != other.result_tree:
            return "it returned another structure than in the call before"
        for mine, theirs in zip(self.results, other.results, strict=True):
            if not mine.same(theirs):
                return (
                    f"it returned {theirs.value!r} and then {mine.value!r}: a replay could only return the same again. "
                    f"Return tensors, and read them outside"
                )
        return self._changed_number(other) if numbers else None

    def _changed_number(self, other: Evidence) -> str | None:
        for mine, theirs in zip(self.numbers, other.numbers, strict=True):
            if type(mine.value) is not type(theirs.value) or repr(mine.value) != repr(theirs.value):
                advice = (
                    ". If it is an optimizer's step count, give the optimizer capturable=True"
                    if "optim" in mine.where
                    else ""
                )
                return f"a number of {mine.op} at {mine.where} was {theirs.value!r} and is {mine.value!r} now{advice}"
        return None

    def replay(self, numbers: Sequence[int] = ()) -> Any:
        """The native object that replays the call. These numbers are given to it at each run."""
        places = self.places
        return C.Replay(
            snapshot=self.snapshot,
            sources=places["sources"],
            targets=places["targets"],
            results=places["made"],
            gradients=places["gradients"],
            holders=self.holders,
            hosts=self.hosts,
            written=self.written,
            kept=places["kept"],
            seeds=places["seeds"],
            draws=places["draws"],
            numbers=list(numbers),
        )
