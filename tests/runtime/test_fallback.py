"""Operators that run eagerly: counted with the user's line, forced, or forbidden."""

from __future__ import annotations

import inspect

import pytest
import torch

import tarry
from tarry.errors import FallbackError
from tarry.events import expect, record
from tarry.events.text import short

USES_DEVICE = True


def test_a_fallback_is_counted_with_the_line() -> None:
    x = torch.tensor([0.0, 1.0, 2.0], device="tarry")
    tarry.metrics.reset()
    with record() as seen:
        found = torch.nonzero(x)
        line = inspect.currentframe().f_lineno - 1
    assert found.flatten().tolist() == [1, 2]
    (event,) = [event for event in seen if event.kind == "fallback"]
    assert event.fields["op"] == "aten::nonzero"
    assert (event.fields["file"], event.fields["line"]) == (__file__, line)
    assert tarry.metrics.counters()["fallback/aten::nonzero"] == 1
    assert f"{short(__file__)}:{line}" in tarry.metrics.report()


def test_fallbacks_can_be_forbidden() -> None:
    x = torch.ones(3, device="tarry")
    with tarry.config.override(fallback="error"):
        with pytest.raises(FallbackError, match=r"aten::nonzero has to run eagerly .*test_fallback\.py:\d+"):
            torch.nonzero(x)
        assert (x + 1).tolist() == [2.0] * 3  # the recorder goes on
    assert torch.nonzero(x).shape == (3, 1)


def test_an_operator_can_be_forced_to_run_eagerly() -> None:
    x = torch.ones(3, device="tarry")
    with tarry.config.override(force_fallback={"aten::add.Tensor"}), expect(fallbacks=1):
        y = x + 1
    with expect(fallbacks=0, syncs=0):
        assert y.tolist() == [2.0] * 3


@pytest.mark.parametrize("wrong", ["aten::add.Tensor", {"add"}])
def test_force_fallback_takes_a_set_of_full_names(wrong) -> None:
    with pytest.raises((TypeError, ValueError), match="aten::add"):
        tarry.config.force_fallback = wrong
    assert tarry.config.force_fallback == frozenset()


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match='"allow" or "error"'):
        tarry.config.fallback = "maybe"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="positive"):
        tarry.config.max_pending_nodes = 0


def test_a_mask_as_index_runs_eagerly_and_a_long_index_does_not() -> None:
    x = torch.arange(4.0, device="tarry")
    with expect(fallbacks=1):
        assert x[x > 1].tolist() == [2.0, 3.0]
    with expect(fallbacks=0):
        assert x[torch.tensor([0, 3], device="tarry")].tolist() == [0.0, 3.0]
    with expect(fallbacks=0):
        x[x > 1] = 0.0
        assert x.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_an_eager_operator_writes_through_views() -> None:
    base = torch.zeros(6, device="tarry")
    left, right = base[:3], base[3:]
    with tarry.config.override(force_fallback={"aten::_foreach_add_.Scalar"}), expect(fallbacks=1):
        torch._foreach_add_([left, right], 2)
    assert base.tolist() == [2.0] * 6
    assert left.tolist() == [2.0] * 3
