"""How much is compiled for one call site: a list that grows makes another graph each time it is used.

A cache that is a Python list of tensors has one more of them at each token. Its graphs differ in how many inputs they
have, or how often an operator comes, so that no program takes two of them, and none comes again before the next text.
What they have in common is the call site: the same operators, recorded at the same lines.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from tarry.backends.base import Batch, Recording
from tarry.runtime import limits
from tarry.runtime.entry import Reason

log = logging.getLogger("tarry")

_TOO_MANY_LENGTHS = Reason("graphs of its site were compiled for enough different numbers of inputs and operators")


@dataclass
class Site:
    """What is known of one call site: the lengths compiled for, and the graph without a program that came last."""

    compiled: set[tuple[int, int]] = field(default_factory=set)
    last: tuple[int, int] | None = None
    in_a_row: int = 0
    warned: bool = False


class Sites:
    """The call sites that were seen last."""

    def __init__(self) -> None:
        self._sites: OrderedDict[tuple[int, int], Site] = OrderedDict()

    def clear(self) -> None:
        """Forget all of them."""
        self._sites.clear()

    def over_budget(self, batch: Batch) -> Reason | None:
        """Why a graph that has come without a program gets none: its site was compiled for enough lengths. Warns once
        per site."""
        site = self._site(batch)
        site.in_a_row = site.in_a_row + 1 if site.last == batch.key else 1
        site.last = batch.key
        if len(site.compiled) < limits.MAX_LENGTHS or _lengths(batch) in site.compiled:
            return None
        if site.in_a_row > limits.LENGTH_PERSISTENCE:
            return None
        if not site.warned:
            site.warned = True
            log.warning(
                "tarry: %s was compiled for %d different numbers of inputs and operators; others run on the reference "
                "path. If a list of tensors grows there: one tensor that grows (torch.cat([cache, new])) is compiled "
                "once for all lengths",
                Recording(batch).describe(),
                limits.MAX_LENGTHS,
            )
        return _TOO_MANY_LENGTHS

    def count(self, batch: Batch) -> None:
        """A graph is about to be compiled."""
        self._site(batch).compiled.add(_lengths(batch))

    def _site(self, batch: Batch) -> Site:
        key = batch.call_site()
        site = self._sites.setdefault(key, Site())
        self._sites.move_to_end(key)
        while len(self._sites) > limits.MAX_SITES:
            self._sites.popitem(last=False)
        return site


def _lengths(batch: Batch) -> tuple[int, int]:
    return batch.num_inputs, batch.num_operations
