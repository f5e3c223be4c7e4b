"""Some 500 step functions, each run on the CPU and under `tarry.compile`: with `verify=1` no value is ever wrong; by
default wrong values come only between a change and the next verified call, which raises; and no step raises unless
something has changed that guards do not see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

import tarry
from tarry.replay import verification
from tests.replay import corpus_states, corpus_tensors, corpus_training  # noqa: F401 - they fill STEPS
from tests.replay.corpus import STEPS
from tests.replay.corpus_routes import combined
from tests.replay.hostile import Case
from tests.replay.test_hostile import batch, on_host, same
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = [tarry_only, pytest.mark.filterwarnings("ignore")]
CALLS = 36
COMBINED = combined(246)
ALL = STEPS | COMBINED
HIDDEN = {name for name in STEPS if name.startswith("within_")}
"""Steps that depend on what no guard sees: they may raise."""


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(verification, "MEAN_GAP", 4)
    verification._random.seed(0)
    before = os.getcwd()
    yield
    os.chdir(before)


class Run:
    """A case on one device, call by call."""

    def __init__(self, case: Case, device: str, step: Any = None) -> None:
        self.case, self.device, self.step = case, device, step or case.step

    def call(self, k: int) -> Any:
        """What the call returned or raised, its argument and the state, on the host."""
        x = batch(k).to(self.device)
        self.raised: Exception | None = None
        result: Any = None
        with self.case.around(k) if self.case.around else nullcontext():
            try:
                result = self.step(x)
            except tarry.ReplayError:
                raise
            except Exception as error:
                self.raised = error
        return on_host((result, type(self.raised), x, self.case.state()))


def runs(name: str, verify: Any) -> tuple[Run, Run]:
    eager, ours = ALL[name]("cpu"), ALL[name]("tarry")
    return Run(eager, "cpu"), Run(ours, "tarry", tarry.compile(ours.step, verify=verify))


@pytest.mark.parametrize("name", ALL)
def test_with_every_call_verified_nothing_is_wrong(name: str) -> None:
    eager, ours = runs(name, 1)
    for k in range(CALLS):
        eager.case.before(k)
        ours.case.before(k)
        expected, found = eager.call(k), ours.call(k)
        assert same(found, expected), f"call {k + 1}: {found} for {expected}\n{ours.step.explain()}"


@pytest.mark.parametrize("name", ALL)
def test_wrong_values_come_only_before_a_verified_call_that_raises(name: str) -> None:
    eager, ours = runs(name, None)
    wrong = 0
    for k in range(CALLS):
        eager.case.before(k)
        ours.case.before(k)
        expected, replays = eager.call(k), ours.step.replays
        try:
            found = ours.call(k)
        except tarry.ReplayError:
            assert name in COMBINED or name in HIDDEN, "nothing hidden has changed"
            return
        is_right = same(found, expected)
        if ours.step.replays == replays:
            if wrong and ours.raised is not None:  # the function's own error
                assert any("replayed since call" in note for note in ours.raised.__notes__)
                return
            assert not wrong, f"call {k + 1} was verified, and raised nothing\n{ours.step.explain()}"
            assert is_right, f"call {k + 1} was recorded: {found} for {expected}\n{ours.step.explain()}"
        wrong += not is_right
    assert not wrong, ours.step.explain()
