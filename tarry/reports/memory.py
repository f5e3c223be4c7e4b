"""Memory over a step, from its graph: which tensors are alive at each node, and which nodes made those at the peak.

It is what the nodes need if they run one by one, in order, and each buffer is freed after its last use. A compiled
program that fuses operators needs less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_POINTS = 1_000
MAX_ALIVE = 200


@dataclass(frozen=True)
class Memory:
    """Bytes alive while each node runs, thinned; and the largest tensors at the peak."""

    positions: list[int]
    bytes: list[int]
    peak: int
    peak_at: int
    inputs: int
    """Bytes of the inputs, which the program holds all the time."""
    alive: list[dict[str, Any]]
    more: int
    """Bytes of the tensors at the peak that `alive` leaves out."""


def memory(stage: Mapping[str, Any]) -> Memory:
    """Memory over the nodes of a stage (`format.OWN["stage"]`)."""
    buffers = _Buffers(stage)
    count = len(stage["op"])
    change = [0] * (count + 2)
    for root, size in buffers.size.items():
        if size and root not in buffers.inputs:
            change[buffers.made[root]] += size
            change[buffers.last[root] + 1] -= size
    held = sum(buffers.size[value] for value in buffers.inputs)
    curve, now = [], held
    for delta in change[:count]:
        now += delta
        curve.append(now)
    peak_at = max(range(count), key=curve.__getitem__) if count else 0
    alive = [
        root
        for root, size in buffers.size.items()
        if size and (root in buffers.inputs or buffers.made[root] <= peak_at <= buffers.last[root])
    ]
    alive.sort(key=lambda root: -buffers.size[root])
    positions, bytes_ = _thinned(curve)
    return Memory(
        positions,
        bytes_,
        curve[peak_at] if curve else held,
        peak_at,
        held,
        [buffers.describe(root, stage) for root in alive[:MAX_ALIVE]],
        sum(buffers.size[root] for root in alive[MAX_ALIVE:]),
    )


class _Buffers:
    """Values that share a buffer have one root: the value that it was allocated for."""

    def __init__(self, stage: Mapping[str, Any]) -> None:
        self.inputs = {value: text for value, text, _ in stage["inputs"]}
        self.size: dict[int, int] = {value: size for value, _, size in stage["inputs"]}
        self.made: dict[int, int] = dict.fromkeys(self.inputs, 0)
        self.last: dict[int, int] = {}
        self._root: dict[int, int] = {value: value for value in self.inputs}
        last_use = _last_uses(stage)
        self._place(stage, last_use)
        for value, at in last_use.items():
            root = self._root.get(value, value)
            self.last[root] = max(self.last.get(root, 0), at)
        for root, at in self.made.items():
            self.last[root] = max(self.last.get(root, 0), at)

    def _place(self, stage: Mapping[str, Any], last_use: Mapping[int, int]) -> None:
        owners: dict[int, int] = dict(stage["views"])
        replaced: dict[int, int] = dict(stage["updates"])
        replaced.update((value, given) for value, given in stage["outputs"] if given is not None)
        for position, results in enumerate(stage["results"]):
            for value, size in results:
                old = replaced.get(value)
                if value in owners:
                    self._root[value] = self._root.get(owners[value], owners[value])
                elif old is not None and old in self._root and last_use.get(old, 0) <= position:
                    self._root[value] = self._root[old]
                else:
                    self._root[value] = value
                    self.size[value], self.made[value] = size, position

    def describe(self, root: int, stage: Mapping[str, Any]) -> dict[str, Any]:
        """A buffer for people: what it is, and where it was made."""
        if root in self.inputs:
            return {"value": root, "bytes": self.size[root], "what": f"input {self.inputs[root]}", "node": -1}
        node = self.made[root]
        return {
            "value": root,
            "bytes": self.size[root],
            "what": stage["op"][node],
            "node": node,
            "last": self.last[root],
        }


def _last_uses(stage: Mapping[str, Any]) -> dict[int, int]:
    """For each value, the last node that reads it, also through a window; for a result, the end."""
    owners = dict(stage["views"])
    found: dict[int, int] = {}
    for position, operands in enumerate(stage["operands"]):
        for value in operands:
            found[value] = position
            if value in owners:
                found[owners[value]] = position
    end = len(stage["op"])
    for value, _ in stage["outputs"]:
        found[value] = found[owners.get(value, value)] = end
    return found


def _thinned(curve: list[int]) -> tuple[list[int], list[int]]:
    """At most MAX_POINTS of the curve: of each interval the highest."""
    width = max(1, -(-len(curve) // MAX_POINTS))
    positions = [
        max(range(start, min(start + width, len(curve))), key=curve.__getitem__)
        for start in range(0, len(curve), width)
    ]
    return positions, [curve[position] for position in positions]
