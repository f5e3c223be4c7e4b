"""Policies: what a step does until its graph is compiled. The results are the same in all of them."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tarry
from tarry.backends.base import Backend, Run
from tarry.errors import BackendError, Unsupported
from tarry.events import Event, record
from tarry.ir.evaluate import evaluate
from tarry.ir.graph import Graph, Node, Number
from tarry.runtime import limits
from tests.runtime.portable import using

USES_DEVICE = True


class Gated(Backend):
    """Compiles when the gate is open."""

    name = "gated"

    def __init__(self, refuses: Callable[[Node, Number, bool], bool] = lambda node, number, varied: False) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.started = threading.Event()
        self.threads: list[str] = []
        self.error: Exception | None = None
        self.refuses = refuses
        self.runs = 0

    def takes_number(self, node: Node, number: Number, varied: bool) -> bool:
        return not self.refuses(node, number, varied)

    def compile(self, graph: Graph) -> Run:
        self.threads.append(threading.current_thread().name)
        self.started.set()
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error

        def run(inputs: list[Any], numbers: list[Any]) -> list[Any]:
            self.runs += 1
            return evaluate(graph, inputs, numbers)

        return run


def _kinds(seen: list[Event]) -> Counter[str]:
    return Counter(event.kind for event in seen)


def _double(x: Tensor) -> list[float]:
    return (x * 2).tolist()


def test_waiting_is_what_a_backend_does_by_itself() -> None:
    backend = Gated()
    backend.gate.set()
    x = torch.ones(2, device="tarry")
    with using(backend), record() as seen:
        assert _double(x) == [2.0, 2.0]
    assert backend.runs == 1
    assert _kinds(seen)["compile"] == 1
    assert _kinds(seen)["reference"] == 0


def test_in_the_background_a_graph_is_compiled_when_it_comes_again_and_takes_over() -> None:
    backend = Gated()
    x = torch.ones(2, device="tarry")
    with using(backend, "background"), record() as seen:
        assert _double(x) == [2.0, 2.0]
        assert not backend.threads  # many graphs come once
        assert _double(x) == [2.0, 2.0]
        assert backend.started.wait(60)
        assert _double(x) == [2.0, 2.0]  # it is being compiled
        assert backend.runs == 0
        assert not tarry.wait_for_compiles(timeout=0.01)
        backend.gate.set()
        assert tarry.wait_for_compiles()
        assert _double(x) == [2.0, 2.0]
        assert backend.runs == 1
    assert backend.threads == ["tarry-background"]
    kinds = _kinds(seen)
    assert (kinds["reference"], kinds["compile"], kinds["cache_hit"], kinds["execute"]) == (3, 1, 0, 4)
    (compiled,) = [event for event in seen if event.kind == "compile"]
    assert compiled.fields["background"] is True
    assert {event.fields["reason"] for event in seen if event.kind == "reference"} == {
        "it is new",
        "its program is being compiled",
    }


def test_never() -> None:
    backend = Gated()
    backend.gate.set()
    x = torch.ones(2, device="tarry")
    with using(backend, "never"), record() as seen:
        for _ in range(3):
            assert _double(x) == [2.0, 2.0]
    assert not backend.threads
    assert _kinds(seen)["reference"] == 3


def test_a_change_of_policy_takes_effect_at_once() -> None:
    backend = Gated()
    backend.gate.set()
    x = torch.ones(2, device="tarry")
    with using(backend):
        with tarry.config.override(compile="never"):
            assert _double(x) == [2.0, 2.0]
        with tarry.config.override(compile="background"):
            assert _double(x) == [2.0, 2.0]
        assert not backend.threads
        assert _double(x) == [2.0, 2.0]  # "wait"
        assert backend.runs == 1
        with tarry.config.override(compile="never"):
            assert _double(x) == [2.0, 2.0]
        assert backend.runs == 1
        assert _double(x) == [2.0, 2.0]
        assert backend.runs == 2


def test_waiting_waits_for_what_the_background_has_begun() -> None:
    backend = Gated()
    x = torch.ones(2, device="tarry")
    with using(backend):
        with tarry.config.override(compile="background"):
            _double(x)
            _double(x)
            assert backend.started.wait(60)
        threading.Timer(0.05, backend.gate.set).start()
        assert _double(x) == [2.0, 2.0]
    assert backend.runs == 1
    assert len(backend.threads) == 1


def test_the_policy_of_set_backend_comes_before_the_configured_one() -> None:
    backend = Gated()
    with tarry.config.override(compile="wait"), using(backend, "never"):
        _double(torch.ones(2, device="tarry"))
    assert not backend.threads
    with using(backend):  # and goes with its backend
        backend.gate.set()
        _double(torch.ones(2, device="tarry"))
    assert backend.threads


def test_wrong_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="background"):
        tarry.set_backend("eager", compile="later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="background"):
        tarry.config.compile = "later"  # type: ignore[assignment]
    assert tarry.get_backend().name == "eager"


def test_a_failing_compile_is_reported_once_and_the_program_goes_on() -> None:
    backend = Gated()
    backend.error = RuntimeError("the compiler is broken")
    backend.gate.set()
    x = torch.ones(2, device="tarry")
    with using(backend, "background"), record() as seen:
        _double(x)
        _double(x)
        tarry.wait_for_compiles()
        with pytest.warns(
            UserWarning,
            match=r"backend 'gated' failed to compile a step of 1 operators, recorded from "
            r".*test_policies\.py:\d+ to .*the compiler is broken.*keeps using the reference path",
        ):
            assert _double(x) == [2.0, 2.0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                assert _double(x) == [2.0, 2.0]
    assert len(backend.threads) == 1
    assert _kinds(seen)["error"] == 1
    assert _kinds(seen)["reference"] == 6


def test_what_a_backend_declines_runs_on_the_reference_path() -> None:
    backend = Gated()
    backend.error = Unsupported(None, "it is too hard")
    backend.gate.set()
    x = torch.ones(2, device="tarry")
    with using(backend, "background"), record() as seen:
        _double(x)
        _double(x)
        tarry.wait_for_compiles()
        with pytest.warns(UserWarning, match="does not compile this step: it is too hard"):
            assert _double(x) == [2.0, 2.0]
        assert _double(x) == [2.0, 2.0]
    assert _kinds(seen)["interpreted"] == 2
    assert _kinds(seen)["error"] == 0


def test_a_failing_compile_that_was_waited_for_leaves_all_pending() -> None:
    backend = Gated()
    backend.error = RuntimeError("the compiler is broken")
    backend.gate.set()
    with using(backend):
        y = torch.ones(2, device="tarry") * 2
        with pytest.raises(BackendError, match="failed to compile"):
            y.tolist()
        backend.error = None
        assert y.tolist() == [2.0, 2.0]


def test_another_backend_takes_over_from_one_that_compiles() -> None:
    backend = Gated()
    x = torch.ones(2, device="tarry")
    tarry.set_backend(backend, compile="background")
    _double(x)
    _double(x)
    assert backend.started.wait(60)
    (x * 3).tolist()
    (x * 3).tolist()
    (x + x).tolist()
    (x + x).tolist()  # waits behind the first
    threading.Timer(0.1, backend.gate.set).start()
    tarry.set_backend("eager")
    assert tarry.wait_for_compiles(timeout=0)
    assert len(backend.threads) == 1  # what was waiting is dropped
    assert _double(x) == [2.0, 2.0]


def test_no_more_is_begun_than_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED_JOBS", 2)
    backend = Gated()
    with using(backend, "background"), record() as seen:
        inputs = [torch.ones(size).to("tarry") for size in range(1, 7)]
        for x in inputs:
            _double(x)
        for x in inputs:
            _double(x)
            assert backend.started.wait(60)
        crowded = [event for event in seen if "too many" in event.fields.get("reason", "")]
        assert len(crowded) == 3  # one is being compiled, two wait
        backend.gate.set()
        for _ in range(3):
            tarry.wait_for_compiles()
            for x in inputs:
                assert _double(x) == [2.0] * len(x)
        assert backend.runs >= 6
    assert len(backend.threads) == 6


def test_settings_of_the_process_are_those_of_the_moment() -> None:
    class Counting(Gated):
        def compile(self, graph: Graph) -> Run:
            self.threads.append(str(torch.get_num_threads()))
            return lambda inputs, numbers: evaluate(graph, inputs, numbers)

    backend = Counting()
    before = torch.get_num_threads()
    x = torch.ones(2).to("tarry")
    try:
        with using(backend, "background"):
            for count, program in ((1, torch.sin), (2, torch.cos)):
                torch.set_num_threads(count)
                for _ in range(2):
                    program(x).tolist()
                tarry.wait_for_compiles()
    finally:
        torch.set_num_threads(before)
    assert backend.threads == ["1", "2"]


# ---- numbers that are constants to a program


def _refuse_all(node: Node, number: Number, varied: bool) -> bool:
    return True


def _refuse_at_first(node: Node, number: Number, varied: bool) -> bool:
    return not varied


def test_a_constant_that_becomes_an_input_is_compiled_for_at_its_first_change() -> None:
    backend = Gated(_refuse_at_first)
    backend.gate.set()
    x = torch.ones(2, device="tarry")
    with using(backend, "background"), record() as seen:
        for factor in (2.0, 2.0):
            (x * factor).tolist()
        tarry.wait_for_compiles()
        assert (x * 2.0).tolist() == [2.0, 2.0]
        assert (x * 3.0).tolist() == [3.0, 3.0]
        tarry.wait_for_compiles()
        for factor in (4.0, 5.0, 6.0):
            assert (x * factor).tolist() == [factor, factor]
    assert len(backend.threads) == 2
    assert backend.runs == 4
    reasons = [event.fields["reason"] if event.fields["again"] else "" for event in seen if event.kind == "compile"]
    assert reasons[0] == ""
    assert "was 2.0 and is 3.0 now" in reasons[1]


def test_constants_that_come_once_are_not_compiled_for() -> None:
    backend = Gated(_refuse_all)
    backend.gate.set()
    x = torch.ones(2, device="tarry")
    with using(backend, "background"):
        (x * 2.0).tolist()
        (x * 2.0).tolist()
        tarry.wait_for_compiles()
        for factor in (2.0, 3.0, 4.0, 5.0):
            assert (x * factor).tolist() == [factor, factor]
            tarry.wait_for_compiles()
        assert len(backend.threads) == 1
        assert (x * 4.0).tolist() == [4.0, 4.0]  # this one comes again
        tarry.wait_for_compiles()
        assert len(backend.threads) == 2
        before = backend.runs
        for factor in (2.0, 4.0):
            assert (x * factor).tolist() == [factor, factor]
        assert backend.runs == before + 2


def test_constants_for_which_compiling_fails() -> None:
    backend = Gated(_refuse_all)
    backend.gate.set()
    x = torch.ones(2, device="tarry")
    with using(backend, "background"):
        (x * 2.0).tolist()
        (x * 2.0).tolist()
        tarry.wait_for_compiles()
        assert (x * 2.0).tolist() == [2.0, 2.0]
        backend.error = RuntimeError("broken")
        for _ in range(2):
            (x * 3.0).tolist()
        tarry.wait_for_compiles()
        with pytest.warns(UserWarning, match="keeps using the reference path"):
            assert (x * 3.0).tolist() == [3.0, 3.0]
        for factor in (3.0, 2.0, 3.0):
            assert (x * factor).tolist() == [factor, factor]
    assert len(backend.threads) == 2


# ---- the same results


def _train(policy: str) -> list[Tensor]:
    tarry.set_backend("torchscript", compile=policy)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)).to("tarry")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    x, y = torch.randn(5, 6).to("tarry"), torch.randint(3, (5,)).to("tarry")
    losses = []
    for step in range(12):
        loss = F.cross_entropy(model(x[: 5 - step % 2]), y[: 5 - step % 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach().cpu())
        if step == 7:
            tarry.wait_for_compiles()
    values = [*losses, *(value.cpu() for value in model.state_dict().values())]
    tarry.set_backend("eager")
    return values


def test_training_is_the_same_under_every_policy() -> None:
    waited = _train("wait")
    with record() as seen:
        by_background = _train("background")
    assert {"reference", "compile", "cache_hit"} <= set(_kinds(seen))
    never = _train("never")
    for a, b, c in zip(waited, by_background, never, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)
