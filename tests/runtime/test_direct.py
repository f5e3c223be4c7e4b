"""Direct calls (csrc/record/direct.h): when calls are not recorded, and when they are again. Values are the same."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tarry
from tarry import events
from tarry._api import _runtime
from tarry.backends import registry
from tarry.events import record
from tarry.native import C
from tarry.runtime import limits
from tests.aliasing.test_random_programs import write_gradients, write_views
from tests.aliasing.world import World
from tests.runtime.portable import using
from tests.runtime.test_policies import Gated

USES_DEVICE = True
AFTER = 4


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls become direct after a few stretches."""
    monkeypatch.setattr(limits, "DIRECT_AFTER", AFTER)
    yield
    monkeypatch.undo()
    _runtime.on_policy()


@pytest.fixture
def never(soon: None) -> Iterator[None]:
    """No graph gets a program."""
    with using(registry.find("inductor")(), "never"):
        yield


@contextmanager
def forced() -> Iterator[None]:
    """All calls are direct that can be."""
    C.force_direct_calls(True)
    try:
        yield
    finally:
        C.force_direct_calls(False)


def counted(work: Callable[[], object]) -> tuple[int, int]:
    """How many of its calls are recorded, and how many are direct."""
    before = C.counters(0)
    work()
    after = C.counters(0)
    return after["record"] - before["record"], after["direct"] - before["direct"]


def double(x: Tensor) -> list[float]:
    return (x * 2 + 1).tolist()


# ---- when


@pytest.mark.usefixtures("never")
def test_calls_that_get_no_program_become_direct() -> None:
    x = torch.arange(3.0).to("tarry")
    for _ in range(AFTER):
        assert counted(lambda: double(x)) == (2, 0)
    for _ in range(3):
        assert counted(lambda: double(x)) == (0, 2)
    assert double(x) == [1.0, 3.0, 5.0]


@pytest.mark.usefixtures("never")
def test_other_calls_end_it_and_it_takes_longer_to_come_back() -> None:
    x = torch.arange(3.0).to("tarry")
    for _ in range(AFTER):
        double(x)
    assert counted(lambda: (x - 1).tolist()) == (0, 1)  # it is another one only when it is over
    for _ in range(2 * AFTER):
        assert counted(lambda: double(x)) == (2, 0)
    assert counted(lambda: double(x)) == (0, 2)


@pytest.mark.usefixtures("never")
def test_after_a_calm_time_it_comes_back_as_soon_as_at_first() -> None:
    x = torch.arange(3.0).to("tarry")
    for other in (lambda: (x - 1).tolist(), lambda: (x / 2).tolist(), lambda: (x**2).tolist()):
        while counted(lambda: double(x)) != (0, 2):
            pass
        for _ in range(32 * 2 * AFTER):
            assert counted(lambda: double(x)) == (0, 2)
        other()
        for _ in range(2 * AFTER):
            assert counted(lambda: double(x)) == (2, 0)
        assert counted(lambda: double(x)) == (0, 2)


@pytest.mark.usefixtures("soon")
def test_graphs_that_differ_by_no_rule_become_direct() -> None:
    """An action that is an index, say: each graph is new, and none comes often enough for a program."""
    x, chooser = torch.arange(64.0).to("tarry"), random.Random(0)

    def chosen() -> float:
        total = x[chooser.randrange(64)].exp()
        for _ in range(limits.SMALL_OPERATIONS):
            total = total + x[chooser.randrange(64)]
        return total.item()

    with using(Gated(), "background"):
        for _ in range(limits.MAX_FIXED_SIZES + 2 * AFTER):
            chosen()
        assert counted(chosen) == (0, 1 + limits.SMALL_OPERATIONS)


@pytest.mark.usefixtures("never")
def test_after_many_stretches_calls_are_recorded_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DIRECT_UNTIL", 10)
    _runtime.on_policy()
    x = torch.arange(3.0).to("tarry")
    direct = [counted(lambda: double(x))[1] for _ in range(3 * (AFTER + 10))]
    assert direct == 3 * ([0] * AFTER + [2] * 10)


@pytest.mark.usefixtures("soon")
def test_a_program_takes_over() -> None:
    backend = Gated()
    x = torch.arange(3.0).to("tarry")
    with using(backend, "background"):
        for _ in range(AFTER + 10):
            double(x)
        assert counted(lambda: double(x)) == (0, 2)
        backend.gate.set()
        assert tarry.wait_for_compiles()
        double(x)  # the last one: where it ends, the next one may begin otherwise
        assert counted(lambda: double(x)) == (2, 0)
        assert backend.runs == 1
        for _ in range(AFTER + 2):
            assert counted(lambda: double(x)) == (2, 0)


@pytest.mark.usefixtures("soon")
def test_a_mix_with_programs_stays_recorded() -> None:
    backend = Gated()
    backend.gate.set()
    x = torch.arange(3.0).to("tarry")
    with using(backend, "background"):
        for _ in range(3):
            double(x)
            assert tarry.wait_for_compiles()
        assert backend.runs
        backend.gate.clear()
        for _ in range(4 * AFTER):
            assert counted(lambda: double(x)) == (2, 0)
            (x - 1).tolist()
        backend.gate.set()


@pytest.mark.usefixtures("never")
def test_it_can_be_switched_off() -> None:
    x = torch.arange(3.0).to("tarry")
    for _ in range(AFTER):
        double(x)
    assert counted(lambda: double(x)) == (0, 2)
    tarry.config.direct_calls = False
    try:
        double(x)
        for _ in range(2 * AFTER):
            assert counted(lambda: double(x)) == (2, 0)
    finally:
        tarry.config.direct_calls = True


@pytest.mark.usefixtures("never")
def test_who_watches_sees_what_is_recorded() -> None:
    x = torch.arange(3.0).to("tarry")
    for _ in range(AFTER):
        double(x)
    with record() as seen:
        assert counted(lambda: double(x)) == (2, 0)
    assert [event.fields["operations"] for event in seen if event.kind == "sync"] == [2]


@pytest.mark.usefixtures("never")
def test_who_can_wait_is_given_direct_stretches() -> None:
    x = torch.arange(3.0).to("tarry")
    for _ in range(AFTER):
        double(x)
    seen: list[events.Event] = []
    with events.subscribe(seen.append, live=False):
        double(x)
    assert [(e.fields["path"], e.fields["operations"]) for e in seen if e.kind == "sync"] == [("direct", 2)]


@pytest.mark.usefixtures("never")
def test_what_cannot_be_direct_is_recorded_in_the_middle() -> None:
    x, out = torch.arange(3.0).to("tarry"), torch.empty(3, device="tarry")

    def step() -> list[float]:
        y = x * 2
        torch.add(y, 1, out=out)
        return (out * 3).tolist()

    for _ in range(AFTER):
        assert step() == [3.0, 9.0, 15.0]
    recorded, direct = counted(lambda: step())
    assert direct >= 1
    assert recorded >= 1
    for _ in range(3):
        assert step() == [3.0, 9.0, 15.0]
    assert not tarry.metrics.counters().get("compiling")


# ---- what


def test_training_is_that_of_the_cpu() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x, y = torch.randn(16, 4).to(device), torch.randn(16, 1).to(device)
        found = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses("cpu")
    with forced():
        assert losses("tarry") == pytest.approx(expected, rel=1e-5)


@given(st.data())
@settings(max_examples=60)
def test_views_and_writes(data: st.DataObject) -> None:
    with forced():
        write_views(World(), data, 20)


@given(st.data())
@settings(max_examples=30)
def test_gradients(data: st.DataObject) -> None:
    with forced():
        write_gradients(World(), data, 15)


def test_the_same_random_numbers() -> None:
    def drawn() -> list[list[float]]:
        torch.tarry.manual_seed(3)
        x = torch.rand(4, device="tarry")
        own = torch.Generator("tarry").manual_seed(5)
        normal = torch.randn(4, device="tarry")
        return [t.tolist() for t in (x, normal, nn.functional.dropout(x, 0.5), x.clone().uniform_(generator=own))]

    expected = drawn()
    with forced():
        assert drawn() == expected


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.uniform_(3, 1),
        lambda x: x.normal_(0, -1),
        lambda x: torch.bernoulli(x, p=2.0),
        lambda x: x.random_(5, 2),
        lambda x: torch.multinomial(x, 0),
        lambda x: x.int().exponential_(),
        lambda x: torch.multinomial(x - 9, 1).tolist(),  # by its data, which takes a seed
    ],
)
def test_a_wrong_call_draws_as_much_as_if_it_were_recorded(wrong: Callable[[Tensor], object]) -> None:
    def drawn() -> list[float]:
        torch.tarry.manual_seed(3)
        x = torch.ones(4, device="tarry")
        with pytest.raises(RuntimeError):
            wrong(x)
        return torch.rand(4, device="tarry").tolist()

    expected = drawn()
    with forced():
        assert drawn() == expected


def test_threads_draw_from_the_process_own_generator_in_turn() -> None:
    """An operator without a generator argument draws from the real device's, whose state must stay as it was."""
    x = torch.ones(1 << 15, device="tarry")

    def draw(into: list[float]) -> None:
        into.extend(torch.native_dropout(x, 0.5, True)[0].sum().item() for _ in range(50))

    expected: list[float] = []
    torch.tarry.manual_seed(3)
    for _ in range(3):
        draw(expected)
    torch.tarry.manual_seed(3)
    state, drawn = torch.get_rng_state(), list[float]()
    with forced():
        threads = [threading.Thread(target=draw, args=(drawn,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(drawn) == sorted(expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_comes_at_the_call_and_leaves_what_eager_leaves() -> None:
    x = torch.arange(4.0).to("tarry")
    with forced():
        with pytest.raises(IndexError, match="out of bounds"):
            x[torch.tensor([1, 9], device="tarry")]
        with pytest.raises(RuntimeError, match="size"):
            x.add_(torch.ones(3, device="tarry"))
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(4)
        assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_memory_that_is_shared_is_copied_before_it_is_written() -> None:
    x = torch.arange(4.0).to("tarry")
    y = x + 1  # pending, and reads what x holds
    with forced():
        tarry.sync()
        z = x.detach()
        x.mul_(2)
        assert x.tolist() == z.tolist() == [0.0, 2.0, 4.0, 6.0]
        assert y.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_replay_is_not_disturbed() -> None:
    step = tarry.compile(lambda x: x * 2 + 1, verify=0)
    x = torch.arange(3.0).to("tarry")
    for _ in range(10):
        assert step(x).tolist() == [1.0, 3.0, 5.0]
    with forced():
        for _ in range(3):
            x.add_(1)
            assert step(x).tolist() == (x.cpu() * 2 + 1).tolist()


@pytest.mark.parametrize("direct", [True, False])
def test_threads_that_write_parts_of_one_tensor_lose_nothing(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarry.config, "force_fallback", ["aten::sub_.Tensor"])
    x = torch.zeros(4, 4096).to("tarry")
    barrier = threading.Barrier(4)

    def add(row: int) -> None:
        part, out = x[row], torch.zeros(4096, device="tarry")
        barrier.wait()
        for k in range(300):
            if k % 3 == row:
                part.sub_(-1)  # runs eagerly, direct calls or not
            else:
                part.add_(1)
            if k % 50 == row:  # which is recorded, since it has an out=
                torch.add(part, 0, out=out)

    with forced() if direct else nullcontext():
        threads = [threading.Thread(target=add, args=(row,)) for row in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert x.cpu().unique(dim=1).tolist() == [[300.0]] * 4
