"""Counting what a framework waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tarry import events

CUTS = ("optimizer.step", "mark_step")


def installed(name: str) -> None:
    """Skip the module if a framework is not there: they are an extra, `tarry[frameworks]`.

    What it replaces in torch is put back, since other tests run in this process: PyTorch Geometric has an
    `index_select` of its own, which refuses scalars."""
    before = dict(vars(torch))
    pytest.importorskip(name, reason=f"{name} is not installed (pip install 'tarry[frameworks]')")
    for key, value in before.items():
        if vars(torch)[key] is not value:
            setattr(torch, key, value)


class Reads:
    """How often the program has waited for a value, and how many operators fell back."""

    def __init__(self) -> None:
        self.count = 0
        self.fallbacks = 0

    def __call__(self, event: events.Event) -> None:
        self.count += event.kind == "sync" and event.fields["reason"] not in CUTS
        self.fallbacks += event.kind == "fallback"


@contextmanager
def reads() -> Iterator[Reads]:
    """Count the reads of a block."""
    seen = Reads()
    with events.subscribe(seen):
        yield seen
