"""Steps in chunks: while a program is being compiled for a device that computes by itself, steps are launched as they
are recorded. What is computed is the same, and the program takes over at the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tarry
from tarry.backends.base import Capabilities
from tarry.events import Event, record
from tarry.native import C
from tarry.runtime import limits
from tests.runtime.portable import using
from tests.runtime.test_policies import Gated

USES_DEVICE = True


class Asynchronous(Gated):
    capabilities = Capabilities(asynchronous=True)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHUNK_OPERATIONS", 8)


class Trainer:
    """A network with dropout and running statistics, a step at a time."""

    def __init__(self, device: str, learning_rate: float = 0.1) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())]
        self.net = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=learning_rate)
        self.x = torch.randn(16, 8).to(device)

    def step(self) -> float:
        loss = nn.functional.dropout(self.net(self.x), 0.5).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> list[torch.Tensor]:
        return [value.cpu() for value in self.net.state_dict().values()]


def _cuts(seen: list[Event]) -> list[str]:
    return [event.fields["reason"] for event in seen if event.kind == "sync"]


def test_steps_are_launched_as_they_are_recorded_until_their_program_takes_over() -> None:
    def trained(backend: Any, policy: Any) -> tuple[list[float], list[torch.Tensor], list[list[Event]]]:
        with using(backend, policy):
            trainer = Trainer("tarry")
            losses, events = [], []
            for step in range(10):
                if step == 6 and isinstance(backend, Gated):
                    backend.gate.set()
                    assert tarry.wait_for_compiles()
                with record() as seen:
                    losses.append(trainer.step())
                events.append(seen)
            return losses, trainer.state(), events

    wanted, wanted_state, _ = trained("eager", None)
    backend = Asynchronous()
    losses, state, events = trained(backend, "background")
    assert losses == wanted
    for mine, theirs in zip(state, wanted_state, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    cuts = [_cuts(seen) for seen in events]
    assert all("chunk" not in each for each in cuts[:3])  # new, seen, and submitted when it comes again
    assert all(each.count("chunk") > 3 for each in cuts[3:7])
    assert all("chunk" not in each for each in cuts[7:])  # its program has taken over
    assert backend.runs == 3
    assert len(backend.threads) == 1  # chunks are no graphs of their own


def test_a_call_that_is_watched_is_recorded_whole() -> None:
    backend = Asynchronous()
    with using(backend, "background"):
        trainer = Trainer("tarry")
        for _ in range(4):
            trainer.step()
        C.set_watched("observer", True)
        try:
            with record() as seen:
                trainer.step()
        finally:
            C.set_watched("observer", False)
        assert "chunk" not in _cuts(seen)
        backend.gate.set()


def test_another_backend_gets_whole_steps() -> None:
    backend = Asynchronous()
    with using(backend, "background"):
        trainer = Trainer("tarry")
        for _ in range(4):
            trainer.step()
        backend.gate.set()
        tarry.set_backend("eager")
        with record() as seen:
            trainer.step()
    assert "chunk" not in _cuts(seen)


def test_a_chunk_that_fails_names_its_line_and_leaves_what_eager_leaves() -> None:
    def failing(device: str) -> tuple[str, list[torch.Tensor]]:
        trainer = Trainer(device)
        for _ in range(4):
            trainer.step()
        weights = torch.zeros(3, 8).to(device)
        hidden = trainer.net(trainer.x)  # updates running statistics

        def look_up_beyond() -> float:
            wrong = hidden + nn.functional.embedding(torch.tensor([7]).to(device), weights)
            for _ in range(20):
                wrong = wrong + 1
            return wrong.sum().item()

        with pytest.raises((IndexError, RuntimeError)) as raised:
            look_up_beyond()
        return type(raised.value).__name__, [each for each in trainer.state() if each.dtype != torch.int64]

    backend = Asynchronous()
    with using(backend, "background"):
        error, state = failing("tarry")
        backend.gate.set()
    with using("eager", None):
        same_error, wanted = failing("tarry")
    assert error == same_error
    for mine, theirs in zip(state, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
