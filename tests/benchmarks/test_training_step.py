"""What is timed is what the table says: `tarry.compile` replays its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tarry
from benchmarks._peers import Replayed
from benchmarks.programs import PROGRAMS, Program
from benchmarks.training_step import Trainer

USES_DEVICE = True


@pytest.fixture
def peer() -> Iterator[Replayed]:
    peer = Replayed("eager", "cpu")
    peer.start()
    yield peer
    tarry.set_backend("eager")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_steps_are_replayed(program: Program, peer: Replayed) -> None:
    trainer = Trainer(program, peer)
    first = trainer.step()
    last = trainer.steps(8)
    assert last < first
    train: Any = trainer._train
    assert train.replays + train.verified >= 4, train.explain()
