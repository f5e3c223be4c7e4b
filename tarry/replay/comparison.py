"""Whether two recorded calls compute the same.

They do if every storage that outlives the call gets the same value of the same sources. What was recorded for nothing
but storages that are dead by the end of the call does not count: when Python's garbage collector frees a cycle is no
difference between calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tarry.ir.graph import typed
from tarry.ir.operators import operator
from tarry.ir.raw import RawNode
from tarry.native import C
from tarry.replay.reasons import where

NO_SEED = -1  # of an operator that could draw and does not (kNoSeed in csrc/core/generator.h)


@dataclass
class Deviation:
    """What a call did otherwise than an earlier one. Without an operator, `text` says it all."""

    text: str
    operator: str | None = None
    where: str | None = None
    before: Any = None
    now: Any = None


class Recorded:
    """A call as plain data. `sources` are numbers, per leaf: the same one on both sides means the same source. `roots`
    are those that count, in the same order on both sides. `draws` says how many seeds the call had drawn before that of
    each random node."""

    def __init__(self, snapshot: C.Snapshot, sources: list[int], roots: Sequence[int], draws: Sequence[int]) -> None:
        graph = snapshot.batch.raw()
        self.inputs, self.nodes = graph["inputs"], graph["nodes"]
        self.sources = sources
        self.input_sites = [(file, line) for _, _, file, line in snapshot.leaves()]
        self.roots = [graph["outputs"][k] for k in roots]
        self.type_hashes = snapshot.type_hashes()
        self.items = [list(_items(node)) for node in self.nodes]
        self.operands = [[item[1] for _, item in items if item[0] == "edge"] for items in self.items]
        outputs = [(k, i) for k, node in enumerate(self.nodes) for i in range(len(node["outputs"]))]
        self.producers = dict(
            enumerate(outputs, start=len(self.inputs))
        )  # of a value: its node, and which output it is
        random = [k for k, items in enumerate(self.items) if any(_is_drawn(item) for _, item in items)]
        self.draws = dict(zip(random, draws, strict=True))


def _items(node: RawNode) -> Iterator[tuple[int, Any]]:
    """The arguments with their positions, lists opened, and the seed that is no argument."""
    for position, argument in enumerate(node["args"]):
        if argument[0] == "list":
            yield position, ("list", len(argument[1]))
            yield from ((position, item) for item in argument[1])
        else:
            yield position, argument
    if "seed" in node:
        yield len(node["args"]), node["seed"]


def _is_drawn(item: Any) -> bool:
    return item[0] == "seed" and item[2] != NO_SEED


class Comparison:
    """What one call did otherwise than another. Unless `numbers`, those that operators were given may be others."""

    def __init__(self, before: Recorded, now: Recorded, numbers: bool) -> None:
        self._before = before
        self._now = now
        self._numbers = numbers

    def difference(self) -> Deviation | None:
        pairs: dict[int, int] = {}  # values that are the same
        waiting = list(zip(self._before.roots, self._now.roots, strict=True))
        while waiting:
            was, new = waiting.pop()
            if was in pairs and pairs[was] == new:
                continue
            found = self._values(was, new) if was not in pairs else self._wiring(new)
            if found is not None:
                return self._earliest() or found
            pairs[was] = new
            if was in self._before.producers:
                k, i = self._before.producers[was][0], self._now.producers[new][0]
                waiting += zip(self._before.operands[k], self._now.operands[i], strict=True)
        return None

    def _earliest(self) -> Deviation | None:
        """The first difference in the order of the program says more than the first one on the way back from the
        results."""
        for k in range(min(len(self._before.nodes), len(self._now.nodes))):
            if (found := self._nodes(k, k)) is not None:
                return found
            for was, new in zip(self._before.operands[k], self._now.operands[k], strict=True):
                if max(was, new) < len(self._before.inputs) and (found := self._values(was, new)) is not None:
                    return found
        return None

    def _values(self, was: int, new: int) -> Deviation | None:
        """What is different about two values by themselves, or the nodes that make them."""
        before, now = self._before, self._now
        if was in before.producers and new in now.producers:
            (k, output), (i, other) = before.producers[was], now.producers[new]
            return self._nodes(k, i) or (None if output == other else self._wiring(new))
        if was in before.producers or new in now.producers or before.sources[was] != now.sources[new]:
            return self._at(new, "it reads another tensor at {site} than before")
        return None if before.inputs[was] == now.inputs[new] else self._at(new, _LAYOUT)

    def _nodes(self, k: int, i: int) -> Deviation | None:
        was, new = self._before.nodes[k], self._now.nodes[i]
        name, site = new["op"], where((new["file"], new["line"]))
        if was["op"] != name:
            text = f"it recorded {name} at {site} where it had recorded {was['op']} at "
            return Deviation(text + where((was["file"], was["line"])), name, site, was["op"], name)
        items = list(zip(self._before.items[k], self._now.items[i], strict=False))
        same_forms = all(
            a[0] == b[0] and (a[0] not in ("edge", "list") or a[-1] == b[-1]) for (_, a), (_, b) in items
        )  # views of edges, and lengths of lists
        if was["region"] != new["region"] or len(self._before.items[k]) != len(self._now.items[i]) or not same_forms:
            return Deviation(_WIRING.format(operator=name, site=site), name, site)
        if self._before.draws.get(k) != self._now.draws.get(i):
            text = f"{name} at {site} draws its random numbers at another point of the sequence"
            return Deviation(text, name, site)
        for position, a, b in self._constants(items):
            argument = operator(name).arguments[position].name
            text = f"{argument!r} of {name} at {site} was {a!r} and is {b!r} now"
            if "optim" in site:
                text += ". If it follows from an optimizer's step count, give the optimizer capturable=True"
            return Deviation(text, name, site, a, b)
        if self._before.type_hashes[k] != self._now.type_hashes[i]:
            return Deviation(_LAYOUT.format(operator=name, site=site), name, site)
        return None

    def _constants(self, items: list[Any]) -> Iterator[tuple[int, Any, Any]]:
        """Constants, and numbers if they count, that are different, with the positions of their arguments."""
        for (position, a), (_, b) in items:
            if a[0] == "const" and typed(a[1]) != typed(b[1]):
                yield position, a[1], b[1]
            elif a[0] in ("number", "wrapped") and self._numbers and typed(a[2]) != typed(b[2]):
                yield position, a[2], b[2]

    def _wiring(self, value: int) -> Deviation:
        return self._at(value, _WIRING)

    def _at(self, value: int, text: str) -> Deviation:
        """A deviation where a value of now is made, or first read if it is an input."""
        if value in self._now.producers:
            node = self._now.nodes[self._now.producers[value][0]]
            name, site = node["op"], where((node["file"], node["line"]))
        else:
            name, site = "an input", where(self._now.input_sites[value])
        return Deviation(text.format(operator=name, site=site), name, site)


_LAYOUT = "{operator} at {site} has arguments of other shapes or types"
_WIRING = "{operator} at {site} takes other values, or other views of them"
