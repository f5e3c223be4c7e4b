"""The pool under the surveys: a crash, a hang or an exception is one task's result, and the run goes on."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.pool import Retire, run_pool


def _setup() -> None:
    """Nothing to load for the tasks below."""


def _task(name: str) -> str:
    if name == "crash":
        os.abort()
    if name == "hang":
        time.sleep(60)
    if name == "raise":
        raise ValueError("bad task")
    if name == "last":
        raise Retire("LAST")
    return name.upper()


def test_pool_survives_crashes_hangs_and_exceptions() -> None:
    tasks = ["a", "crash", "b", "raise", "last", "hang", "c"]
    outcomes = {o.task: o for o in run_pool(tasks, _task, setup=_setup, jobs=1, timeout=3)}
    assert set(outcomes) == set(tasks)
    assert [outcomes[t].value for t in "abc"] == ["A", "B", "C"]
    assert outcomes["last"].value == "LAST"
    assert "SIGABRT" in (outcomes["crash"].crash or "")
    assert "no answer" in (outcomes["hang"].crash or "")
    assert "bad task" in (outcomes["raise"].crash or "")


def _bad_setup() -> None:
    raise ImportError("nothing to import")


def test_pool_that_cannot_be_set_up_says_why() -> None:
    with pytest.raises(RuntimeError, match="nothing to import"):
        list(run_pool(["a", "b"], _task, setup=_bad_setup, jobs=2))
