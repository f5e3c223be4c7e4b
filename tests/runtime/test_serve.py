"""Steps that the native part serves without Python: the same values, errors and counts, and never an old decision."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tarry
from tarry._api import _runtime
from tarry.backends import registry
from tarry.errors import FallbackError, TarryError
from tarry.events import record
from tarry.events.text import short
from tarry.native import C
from tarry.runtime import limits
from tests.runtime.portable import using
from tests.runtime.test_policies import Gated
from tests.support.threads import on_threads

USES_DEVICE = True


class Served:
    """Batches that came to Python since it was last asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        compute = _runtime._compute

        def counted(*arguments: Any) -> None:
            self._count += 1
            compute(*arguments)

        monkeypatch.setattr(_runtime, "_compute", counted)

    def by_python(self) -> int:
        count, self._count = self._count, 0
        return count


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor as a user has it: in the background, and not for small graphs."""
    monkeypatch.setattr(limits, "SMALL_OPERATIONS", 8)
    with using(registry.find("inductor")(), "background"):
        yield


@pytest.fixture
def script() -> Iterator[None]:
    """A backend whose programs are native and made at once."""
    with using(registry.find("torchscript")(), "wait"):
        yield


def _chain(x: Tensor, length: int) -> Tensor:
    for k in range(length):
        x = x * 2 + k
    return x.sum()


# ---- small steps


@pytest.mark.usefixtures("small")
def test_a_small_step_does_not_come_to_python(served: Served) -> None:
    x = torch.arange(4.0).to("tarry")
    for _ in range(3):
        assert _chain(x, 2).item() == 24 + 3 * 4 - 4 * 2
    assert served.by_python() == 0
    assert _chain(x, 5).item() == float(_chain(torch.arange(4.0), 5))
    assert served.by_python() == 1, "eleven operators are too many"
    large = torch.ones(limits.SMALL_BYTES).to("tarry")
    assert large.sum().item() == limits.SMALL_BYTES
    assert served.by_python() == 0, "no result is large"
    assert (large + 1).sum().item() == 2 * limits.SMALL_BYTES
    assert served.by_python() == 1, "a result is too large"


@pytest.mark.usefixtures("small")
def test_counts_are_the_same_with_and_without_python() -> None:
    x = torch.arange(4.0).to("tarry")

    def work() -> dict[str, float]:
        tarry.metrics.reset()
        for _ in range(3):
            _chain(x, 2).item()
        x[x > 1].tolist()
        assert tarry.metrics.seconds()["sync"] >= tarry.metrics.seconds()["execute"] > 0
        assert f"{short(__file__)}:" in tarry.metrics.report()
        return {name: n for name, n in tarry.metrics.counters().items() if name != "node_reuse"}

    native = work()
    with record() as seen:
        watched = work()
    assert native == watched
    assert native["sync"] == native["execute"] == native["reference"] == 4
    assert native["fallback/aten::index.Tensor"] == 1
    assert [event.kind for event in seen].count("reference") == 4
    assert {event.fields["reason"] for event in seen if event.kind == "reference"} == {
        "it is small: no program would be worth its making"
    }


@pytest.mark.usefixtures("small")
def test_who_watches_sees_each_step(served: Served) -> None:
    x = torch.ones(2).to("tarry")
    with tarry.events.subscribe(lambda event: None):
        x.sin().tolist()
    assert served.by_python() == 1
    ran = threading.Event()
    tarry.add_step_closure(lambda value: ran.set(), x.cos())
    (x + 1).tolist()
    assert served.by_python() == 1
    assert ran.wait(60)
    tarry.wait()
    with tarry.config.override(fallback="error"), pytest.raises(FallbackError):
        x[x > 0]
    served.by_python()
    x.tan().tolist()
    assert served.by_python() == 0


@pytest.mark.usefixtures("small")
def test_an_error_of_a_small_step_names_the_line_and_is_counted() -> None:
    x, index = torch.ones(2).to("tarry"), torch.tensor([7]).to("tarry")
    tarry.metrics.reset()
    bad = x.index_select(0, index)
    for _ in range(2):
        with pytest.raises(IndexError, match="out of range") as caught:
            bad.tolist()
        assert "test_serve.py" in "".join(getattr(caught.value, "__notes__", [str(caught.value)]))
    assert tarry.metrics.counters()["error"] == 1
    assert x.tolist() == [1, 1]


@pytest.mark.usefixtures("small")
def test_an_optimizer_has_not_counted_a_small_step_that_failed(served: Served) -> None:
    C.set_small_step(100, 1 << 20)
    weight = torch.nn.Parameter(torch.ones(4).to("tarry"))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.ones(4).to("tarry")
    optimizer.step()
    before = weight.tolist()
    weight.grad = torch.ones(4).to("tarry").index_select(0, torch.tensor([0, 1, 2, 9]).to("tarry"))
    with pytest.raises(IndexError):
        optimizer.step()
    assert served.by_python() == 0
    assert optimizer.state[weight]["step"].item() == 1
    assert weight.tolist() == before


@pytest.mark.usefixtures("small")
def test_several_threads_read_small_steps() -> None:
    def work() -> None:
        x = torch.arange(8.0).to("tarry")
        for k in range(200):
            assert (x + k).sum().item() == 28 + 8 * k

    on_threads(work, 4)


@pytest.mark.usefixtures("small")
def test_a_backend_that_compiles_must_not_ask_for_a_small_step() -> None:
    x = torch.ones(2).to("tarry").sin()
    C.set_compiling(True)
    try:
        with pytest.raises(TarryError, match="while a backend compiles"):
            x.tolist()
    finally:
        C.set_compiling(False)
    assert x.tolist() == torch.ones(2).sin().tolist()


def test_policies_decide_what_is_served(served: Served) -> None:
    x = torch.ones(2).to("tarry")
    with using(registry.find("inductor")(), "background"):
        with tarry.config.override(compile="never"):
            pass  # the policy that was chosen with the backend comes first
        x.sin().tolist()
        assert served.by_python() == 1
    tarry.set_backend("torchscript")
    with tarry.config.override(compile="never"):
        _chain(x, 20).item()
        assert served.by_python() == 0
        assert "compile" not in tarry.metrics.counters()
    _chain(x, 20).item()
    assert served.by_python() == 1
    tarry.set_backend("eager")
    _chain(x, 20).item()
    assert served.by_python() == 1, "it takes steps as they were recorded"


# ---- programs


def _first(x: Tensor) -> tuple[Tensor]:
    return (x,)


def _square(x: Tensor, by: float) -> float:
    return (x * x * by).sum().item()


@pytest.mark.usefixtures("script")
def test_a_program_that_has_run_is_run_without_python(served: Served) -> None:
    x = torch.ones(4).to("tarry")
    assert [_square(x, by) for by in (1.0, 2.0, 3.0)] == [4, 8, 12]
    assert served.by_python() == 1
    assert tarry.metrics.counters()["cache_hit"] == 2
    assert tarry.metrics.counters()["compile"] == 1
    with record() as seen:
        assert _square(x, 5.0) == 20
    assert [event.kind for event in seen] == ["cache_hit", "execute", "sync", "read"]


@pytest.mark.usefixtures("script")
def test_parameters_are_updated_where_they_are(served: Served) -> None:
    x = torch.ones(4).to("tarry")
    for k in range(1, 5):
        x.mul_(2)
        x.add_(1.0, alpha=k)
        assert x.sum().item() > 0
    expected = torch.ones(4)
    for k in range(1, 5):
        expected.mul_(2).add_(1.0, alpha=k)
    assert x.tolist() == expected.tolist()
    assert served.by_python() < 4


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("change", ["backend", "policy", "evicted"])
def test_what_is_forgotten_is_not_run(served: Served, change: str) -> None:
    x = torch.ones(4).to("tarry")
    for _ in range(2):
        _square(x, 1.0)
    served.by_python()
    if change == "backend":
        tarry.set_backend(registry.find("torchscript")(), compile="wait")
    elif change == "policy":
        tarry.set_backend("torchscript", compile="never")
        tarry.set_backend("torchscript", compile="wait")
    else:
        with tarry.config.override(max_cached_programs=1):
            x.sin().tolist()  # the program was served since, and stays
            x.cos().tolist()
            x.tan().tolist()
        served.by_python()
    assert _square(x, 1.0) == 4
    assert served.by_python() == 1


@pytest.mark.usefixtures("script")
def test_a_program_in_use_is_not_the_least_recently_used() -> None:
    x = torch.ones(4).to("tarry")
    _square(x, 1.0)
    with tarry.config.override(max_cached_programs=2):
        for k in range(1, 6):
            assert _square(x, 2.0) == 8
            (x + 1).view(1, 4).expand(k, 4).sum().item()  # another graph each time
    assert tarry.metrics.counters()["compile"] == 6


@pytest.mark.usefixtures("script")
def test_another_structure_with_the_same_key_is_not_taken_for_it() -> None:
    x = torch.ones(4).to("tarry")
    known = C.peek([(x * x * 3.0).sum()]).structure()
    program = C.script_program(torch.jit.script(_first).graph, [], [], [])
    other = x.sin().sum()
    known.key = C.peek([other]).key
    with C.step_lock():
        C.remember_program(known, {}, program, [], lambda batch, error: None)
    assert other.item() == pytest.approx(float(torch.ones(4).sin().sum()))


@pytest.mark.usefixtures("script")
def test_a_program_that_fails_on_data_names_the_line(served: Served) -> None:
    x = torch.arange(4.0).to("tarry")

    def pick(k: int) -> Tensor:
        return x.index_select(0, torch.tensor([k]).to("tarry")) * 2

    for k in range(3):
        assert pick(k).tolist() == [2 * k]
    served.by_python()
    bad = pick(7)
    with pytest.raises(IndexError, match="out of range") as caught:
        bad.tolist()
    assert "test_serve.py" in "".join(getattr(caught.value, "__notes__", [str(caught.value)]))
    assert served.by_python() == 0
    assert tarry.metrics.counters()["error"] == 1
    assert pick(3).tolist() == [6]


@pytest.mark.usefixtures("script")
def test_a_replay_is_run_without_python(served: Served) -> None:
    step = tarry.compile(lambda x: (x * 2 + 1).sum(), verify=0)
    seen: list[tarry.events.Event] = []

    def calls(count: int) -> dict[str, float]:
        tarry.metrics.reset()
        for k in range(count):
            assert step(torch.full((3,), float(k), device="tarry")).item() == 6 * k + 3
        return {name: n for name, n in tarry.metrics.counters().items() if name not in ("node_reuse", "overlapped")}

    calls(4)
    served.by_python()
    native = calls(5)
    assert served.by_python() == 0
    with tarry.events.subscribe(lambda event: None):
        watched = calls(5)
    assert served.by_python() > 5, "a replay, and what its argument is filled with"
    assert native == watched
    assert native["replay"] == 5
    with tarry.events.subscribe(seen.append, live=False):
        calls(5)
    paths = [event.fields["path"] for event in seen if event.kind == "sync" and event.fields["reason"] == "replay"]
    assert paths == ["replayed"] * 5
    assert served.by_python() == 0


# ---- the reference path, while a program is being made


def _many(x: Tensor) -> float:
    return _chain(x, 9).item()


def test_the_reference_path_needs_no_python_while_a_program_is_made(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DIRECT_AFTER", 0)  # no call is direct
    backend = Gated()
    x = torch.arange(4.0).to("tarry")
    expected = _many(torch.arange(4.0))
    with using(backend, "background"):
        for _ in range(limits.TAKEOVER_STEPS + 1):
            assert _many(x) == expected
        served.by_python()
        assert [_many(x) for _ in range(5)] == [expected] * 5
        assert served.by_python() == 0
        with record() as seen:
            assert _many(x) == expected
        assert "reference" in {event.kind for event in seen}, "who watches sees each step"
        before = tarry.metrics.counters()["reference"]
        assert _many(x) == expected
        assert tarry.metrics.counters()["reference"] == before + 1
        assert backend.runs == 0
        backend.gate.set()
        assert tarry.wait_for_compiles()
        served.by_python()
        assert _many(x) == expected
        assert (backend.runs, served.by_python()) == (1, 1), "the program takes over at once"


def test_a_step_that_fails_while_its_program_is_made_is_taken_back(served: Served) -> None:
    backend = Gated()
    table = torch.ones(8, 4).to("tarry").requires_grad_()
    optimizer = torch.optim.Adam([table], lr=0.1)

    def step(index: int) -> None:
        optimizer.zero_grad()
        (table[torch.tensor([index]).to("tarry")] * 2).square().sum().backward()
        optimizer.step()

    with using(backend, "background"):
        for _ in range(limits.TAKEOVER_STEPS + 3):
            step(1)
        before, count = table.tolist(), optimizer.state[table]["step"].item()
        served.by_python()
        try:
            with pytest.raises(IndexError, match="out of bounds"):
                step(99)
            assert served.by_python() == 0
            assert table.tolist() == before
            step(1)
            assert optimizer.state[table]["step"].item() == count + 1
        finally:
            backend.gate.set()


def test_a_graph_without_a_program_is_interpreted_without_python(served: Served) -> None:
    backend = Gated()
    backend.error = ValueError("no")
    backend.gate.set()
    x = torch.arange(4.0).to("tarry")
    with using(backend, "background"):
        for _ in range(2):
            _many(x)
        assert tarry.wait_for_compiles()
        with pytest.warns(UserWarning, match="compiling in the background failed"):
            _many(x)
        served.by_python()
        assert _many(x) == _many(torch.arange(4.0))
        assert served.by_python() == 0


def test_the_reference_path_compares_structures() -> None:
    x = torch.ones(4).to("tarry")
    with using(Gated(), "background"):
        known = C.peek([(x * x * 3.0).sum()]).structure()
        other = x.sin().cos().sum()
        known.key = C.peek([other]).key
        with C.step_lock():
            C.remember_reference(known)
        assert other.item() == pytest.approx(float(torch.ones(4).sin().cos().sum()))


def test_threads_read_while_programs_come_and_go() -> None:
    """A program becomes ready, and the reference path is withdrawn, while others are in the middle of a step."""
    backend = Gated()
    backend.gate.set()

    def work() -> None:
        y = torch.ones(4).to("tarry")
        for length in range(9, 15):
            expected = float(_chain(torch.ones(4), length))
            for _ in range(20):
                assert _chain(y, length).item() == expected

    with using(backend, "background"):
        on_threads(work)
        tarry.wait_for_compiles()
