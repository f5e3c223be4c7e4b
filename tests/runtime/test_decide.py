"""What is done with a batch, as a table: the state of its graph, the facts and the policy, without a device."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.backends.base import Policy
from tarry.errors import BackendError
from tarry.runtime.compile.jobs import Job
from tarry.runtime.decide import (
    COMPILING,
    NEVER,
    NEW,
    CompileNow,
    Decision,
    Facts,
    Interpret,
    RefuseRecompile,
    Run,
    Submit,
    decide,
)
from tarry.runtime.entry import Entry, Reason, State

FULL = Reason("too much")
UNSUPPORTED = Reason("too hard", unsupported=True)
NONE = Facts()
BUDGET = Facts(over_budget=FULL)
CERTAIN = Facts(certain=True)
STRICT = Facts(no_recompile=True)
ALL = Facts(no_recompile=True, over_budget=FULL, certain=True)

TABLE: list[tuple[State, Facts, Policy, Decision]] = [
    # Waiting: a graph without a program gets one before its batch runs.
    (State.NEW, NONE, "wait", CompileNow()),
    (State.SEEN, NONE, "wait", CompileNow()),
    (State.COMPILING, NONE, "wait", CompileNow()),
    (State.READY, NONE, "wait", Run()),
    (State.REFUSED, NONE, "wait", Interpret(UNSUPPORTED)),
    # In the background: when it comes again, or if the program is certain to be used.
    (State.NEW, NONE, "background", Interpret(NEW)),
    (State.NEW, CERTAIN, "background", Submit()),
    (State.SEEN, NONE, "background", Submit()),
    (State.COMPILING, NONE, "background", Interpret(COMPILING)),
    (State.READY, NONE, "background", Run()),
    (State.REFUSED, NONE, "background", Interpret(UNSUPPORTED)),
    # Never: a program that is there is not used either.
    *[(state, facts, "never", Interpret(NEVER)) for state in State for facts in (NONE, BUDGET, CERTAIN, STRICT, ALL)],
    # A budget that is spent: nothing new is compiled, what is there or under way is used.
    (State.NEW, BUDGET, "wait", Interpret(FULL)),
    (State.SEEN, BUDGET, "wait", Interpret(FULL)),
    (State.NEW, BUDGET, "background", Interpret(NEW)),
    (State.NEW, Facts(over_budget=FULL, certain=True), "background", Interpret(FULL)),
    (State.SEEN, BUDGET, "background", Interpret(FULL)),
    (State.COMPILING, BUDGET, "wait", CompileNow()),
    (State.READY, BUDGET, "background", Run()),
    # Inside no_recompile(): an error for what has no program, and none under way.
    (State.NEW, STRICT, "wait", RefuseRecompile()),
    (State.SEEN, STRICT, "wait", RefuseRecompile()),
    (State.NEW, STRICT, "background", RefuseRecompile()),
    (State.SEEN, STRICT, "background", RefuseRecompile()),
    (State.SEEN, ALL, "background", RefuseRecompile()),
    (State.COMPILING, STRICT, "wait", CompileNow()),
    (State.COMPILING, STRICT, "background", Interpret(COMPILING)),
    (State.READY, STRICT, "wait", Run()),
    (State.REFUSED, STRICT, "wait", Interpret(UNSUPPORTED)),
]


@pytest.mark.parametrize(("state", "facts", "policy", "expected"), TABLE)
def test_decisions(state: State, facts: Facts, policy: Policy, expected: Decision) -> None:
    entry: Entry[Any] = Entry(state, reason=UNSUPPORTED if state is State.REFUSED else None)
    assert decide(entry, facts, policy) == expected
    assert entry.state is state, "a decision changes nothing"


@pytest.mark.parametrize("policy", ["wait", "background", "never"])
def test_what_a_backend_takes_as_recorded_runs_under_every_policy(policy: Policy) -> None:
    assert decide(Entry(State.READY, made=print, prepared=True), ALL, policy) == Run()


def test_every_state_and_policy_has_its_row() -> None:
    rows = {(state, policy) for state, _, policy, _ in TABLE}
    assert rows == {(state, policy) for state in State for policy in ("wait", "background", "never")}


def test_an_entry_is_open_until_it_is_compiled_or_refused() -> None:
    entry: Entry[str] = Entry()
    assert entry.is_open
    entry.settle("a program")
    assert (entry.state, entry.made, entry.is_open) == (State.READY, "a program", False)
    refused: Entry[str] = Entry()
    refused.settle(UNSUPPORTED)
    assert (refused.state, refused.reason, refused.made) == (State.REFUSED, UNSUPPORTED, None)


# ---- what becomes of a job


def _finished(outcome: Any) -> Entry[str]:
    def work() -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    entry: Entry[str] = Entry(State.SEEN)
    job: Job[str | Reason] = Job(work)
    entry.begin(job)
    assert (entry.state, entry.is_open, job.done) == (State.COMPILING, False, False)
    job.run()
    assert job.done
    return entry


def test_a_job_that_is_done_makes_its_entry_ready() -> None:
    entry = _finished("a program")
    assert entry.finish() == "a program"
    assert (entry.state, entry.made, entry.job) == (State.READY, "a program", None)


def test_a_job_that_is_refused_or_fails_makes_its_entry_refused() -> None:
    entry = _finished(UNSUPPORTED)
    assert entry.finish() is UNSUPPORTED
    assert (entry.state, entry.reason) == (State.REFUSED, UNSUPPORTED)
    error = BackendError("broken\nin many lines")
    error.add_note("while backend 'b' compiled it; all is still pending")
    entry = _finished(error)
    with pytest.warns(UserWarning, match="keeps using the reference path"):
        reason = entry.finish()
    assert reason == Reason("compiling in the background failed: broken (while backend 'b' compiled it)")
    assert (entry.state, entry.reason, entry.made) == (State.REFUSED, reason, None)


def test_a_job_that_was_stopped_may_be_begun_again() -> None:
    entry: Entry[str] = Entry(State.SEEN)
    job: Job[str | Reason] = Job(lambda: "a program")
    entry.begin(job)
    job.cancel()
    assert entry.finish() is None
    assert (entry.state, entry.job) == (State.SEEN, None)
    assert decide(entry, NONE, "background") == Submit()
