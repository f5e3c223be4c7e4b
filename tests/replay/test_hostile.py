"""The promise of tarry.compile, tried with functions that break its contract: with `verify=1` no value is ever wrong;
otherwise wrong values come only between a change and the next verified call, which raises."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import tarry
from tests.replay.hostile import EFFECTS, SEEN, Case, Make, in_place, seen, with_effect
from tests.replay.hostile_own import OWN
from tests.replay.hostile_places import PLACES
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only
CHANGE = 7
"""The call before which something changes: the function is being replayed by then."""
CALLS = 20

HIDDEN: dict[str, Make] = {name: in_place(place) for name, place in PLACES.items()}
HIDDEN |= {name: with_effect(made) for name, made in EFFECTS.items()}
ALL = HIDDEN | OWN | {name: seen(change) for name, change in SEEN.items()}


@pytest.fixture(autouse=True)
def _working_directory() -> Iterator[None]:
    before = os.getcwd()
    yield
    os.chdir(before)


def batch(k: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(k))


def on_host(found: Any) -> tuple[list[Any], str]:
    leaves, tree = tree_flatten(found)
    return [t.detach().cpu() if isinstance(t, Tensor) else t for t in leaves], str(tree)


def same(found: Any, expected: Any) -> bool:
    """Whether two results, on the host, are the same: structure, types, and values up to rounding."""
    if found[1] != expected[1] or len(found[0]) != len(expected[0]):
        return False
    for mine, theirs in zip(found[0], expected[0], strict=True):
        if not isinstance(theirs, Tensor):
            is_same = type(mine) is type(theirs) and repr(mine) == repr(theirs)
        else:
            is_same = mine.dtype == theirs.dtype and mine.shape == theirs.shape
            is_same = is_same and torch.allclose(mine.double(), theirs.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
        if not is_same:
            return False
    return True


def pair(make: Make) -> tuple[Case, Case]:
    return make("cpu"), make("tarry")


@pytest.mark.parametrize("name", ALL)
def test_with_every_call_verified_nothing_is_wrong(name: str) -> None:
    eager, ours = pair(ALL[name])
    step = tarry.compile(ours.step, verify=1)
    for k in range(CALLS):
        if k == CHANGE:
            eager.change()
            ours.change()
        expected, found = on_host(eager.step(batch(k))), on_host(step(batch(k).to("tarry")))
        assert same(found, expected), f"call {k + 1}: {found} for {expected}\n{step.explain()}"
        assert same(on_host(ours.state()), on_host(eager.state())), f"call {k + 1}"
    assert step.recorded == CALLS


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_change_raises_at_the_next_verified_call(name: str) -> None:
    eager, ours = pair(HIDDEN[name])
    step = tarry.compile(ours.step)
    for k in range(CHANGE):
        x = batch(k)
        assert same(on_host(step(x.to("tarry"))), on_host(eager.step(x)))
    assert step.verified >= 1 or step.replays == 0, step.explain()
    eager.change()
    ours.change()
    wrong, raised = False, None
    for k in range(CHANGE, CALLS):
        recorded = step.recorded
        expected = on_host(eager.step(batch(k)))
        try:
            found = step(batch(k).to("tarry"))
        except tarry.ReplayError as error:
            raised = error, k + 1
            break
        is_right = same(on_host(found), expected)
        if step.recorded > recorded:
            assert not wrong, "a verified call has let wrong replays pass"
            assert is_right
        wrong = wrong or not is_right
    if raised is not None:
        error, call = raised
        first, last, count = error.replayed
        assert CHANGE - 3 <= error.last_verified < first <= last < error.call == call
        assert count == last - first + 1
        assert f"{count} calls" in str(error) or count == 1
    else:
        assert not wrong, step.explain()
        assert "why a call was recorded" in step.explain() or step.replays == 0  # a guard has seen it


@pytest.mark.parametrize("name", OWN)
def test_a_state_of_its_own_is_seen_or_raises(name: str) -> None:
    eager, ours = pair(OWN[name])
    step = tarry.compile(ours.step)
    for k in range(CALLS):
        x = batch(k)
        try:
            found = step(x.to("tarry"))
        except tarry.ReplayError:
            return
        assert same(on_host(found), on_host(eager.step(x))), step.explain()


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("verify", [None, 0])
def test_what_guards_see_is_never_wrong(name: str, verify: Any) -> None:
    eager, ours = pair(seen(SEEN[name]))
    step = tarry.compile(ours.step, verify=verify)
    for k in range(CALLS):
        if k == CHANGE:
            eager.change()
            ours.change()
        x = batch(k)
        assert same(on_host(step(x.to("tarry"))), on_host(eager.step(x))), f"call {k + 1}\n{step.explain()}"
        assert same(on_host(ours.state()), on_host(eager.state())), f"call {k + 1}"
    assert step.replays >= 4, step.explain()
