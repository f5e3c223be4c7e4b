"""How much is compiled for one place of a program: a list that grows makes another graph each time it is used.

A cache that is a Python list of tensors has one more of them at each token. Its graphs differ in how many inputs they
have, or how often an operator comes, so that no program takes two of them, and none comes again before the next text.
What they have in common is the place: the same operators, recorded at the same lines.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from tarry.backends.base import Batch
from tarry.runtime.steps import Recording, ReferenceStep

log = logging.getLogger("tarry")

MAX_LENGTHS = 8
"""Numbers of inputs and operators for which graphs of one place are compiled. Graphs that differ in anything else
(types, arguments) are not counted: a helper function that is called with everything makes those."""
PERSISTENCE = 8
"""How often a graph beyond those has to come in a row, at its place, to be compiled all the same: a model of another
depth is trained for more steps than that, while a list that grows is never as long twice in a row."""
MAX_PLACES = 512


@dataclass
class Place:
    """What is known of one place: the lengths compiled for, and the graph without a program that came last."""

    compiled: set[tuple[int, int]] = field(default_factory=set)
    last: tuple[int, int] | None = None
    in_a_row: int = 0
    said: bool = False


class Places:
    """The places that were seen last."""

    def __init__(self) -> None:
        self._places: OrderedDict[tuple[int, int], Place] = OrderedDict()

    def clear(self) -> None:
        """Forget all of them."""
        self._places.clear()

    def crowded(self, batch: Batch) -> ReferenceStep | None:
        """The reference path, if enough was compiled for graphs of this place that differ in length. Says so once."""
        place = self._place(batch)
        if len(place.compiled) < MAX_LENGTHS or _lengths(batch) in place.compiled:
            return None
        place.in_a_row = place.in_a_row + 1 if place.last == batch.key else 1
        place.last = batch.key
        if place.in_a_row > PERSISTENCE:
            return None
        if not place.said:
            place.said = True
            log.warning(
                "tarry: %s was compiled for %d different numbers of inputs and operators; others run on the reference "
                "path. If a list of tensors grows there: one tensor that grows (torch.cat([cache, new])) is compiled "
                "once for all lengths",
                Recording(batch).describe(),
                MAX_LENGTHS,
            )
        return _CROWDED

    def compiled(self, batch: Batch) -> None:
        """A graph is about to be compiled."""
        self._place(batch).compiled.add(_lengths(batch))

    def _place(self, batch: Batch) -> Place:
        key = batch.place()
        place = self._places.setdefault(key, Place())
        self._places.move_to_end(key)
        while len(self._places) > MAX_PLACES:
            self._places.popitem(last=False)
        return place


_CROWDED = ReferenceStep("graphs of its place were compiled for enough different numbers of inputs and operators")


def _lengths(batch: Batch) -> tuple[int, int]:
    return batch.num_inputs, batch.num_operations
