"""When calls are verified, what a deviation does, and that what is no deviation raises nothing."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tarry
from tarry.replay import capture
from tarry.replay.verification import MEAN_GAP, Verification
from tests.replay.hostile_places import Hidden
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


def ones(*sizes: int) -> Tensor:
    return torch.ones(*sizes, device="tarry")


# ---- when


def _gaps(count: int) -> list[int]:
    verification = Verification(None, 0)
    gaps = []
    for call in range(count):
        gap = 0
        while not verification.is_due():
            verification.note_replay(call)
            gap += 1
        verification.note_verified(call)
        gaps.append(gap)
    return gaps


def test_verified_calls_are_dense_at_first_and_random_later() -> None:
    gaps = _gaps(4000)
    assert gaps[:7] == [1, 2, 4, 8, 16, 32, 64]
    later = gaps[7:]
    assert 0.9 * MEAN_GAP < sum(later) / len(later) < 1.1 * MEAN_GAP
    assert len(set(later)) > 100, "never a fixed period"
    assert min(later) < 10
    assert _gaps(20) != _gaps(20)


def test_a_seed_does_not_decide_what_is_verified_nor_the_other_way_round() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state().tolist()
    _gaps(20)
    assert torch.get_rng_state().tolist() == before


@pytest.mark.parametrize(("verify", "counts"), [(0, (2, 18, 0)), (1, (20, 0, 18)), (None, (5, 15, 3))])
def test_how_much_is_verified(verify: Any, counts: tuple[int, int, int]) -> None:
    step = tarry.compile(lambda x: x * 2, verify=verify)
    for _ in range(20):
        step(ones(2))
    assert (step.recorded, step.replays, step.verified) == counts, step.explain()
    assert f"{counts[2]} verified" in step.explain()
    if verify is None:
        assert "call 12, the last verified one" in step.explain()


@pytest.mark.parametrize("wrong", [{"verify": 2}, {"verify": "all"}, {"on_deviation": "ignore"}])
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        tarry.compile(lambda x: x, **wrong)


def test_the_graph_of_a_call_that_does_the_same_is_not_described_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The structures are compared: with random numbers, gradients, and batches that come from the host."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).to("tarry")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def function(batch: dict[str, Tensor]) -> Any:
        optimizer.zero_grad()
        loss = model(batch["x"].to("tarry")).pow(2).mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "sizes": (3, batch["x"].shape)}

    step = tarry.compile(function, verify=1)
    for _ in range(3):
        step({"x": torch.randn(4, 3)})
    described: list[Any] = []
    monkeypatch.setattr(capture, "Recorded", lambda *args: described.append(args))
    for _ in range(5):
        step({"x": torch.randn(4, 3)})
    assert step.verified == 5, step.explain()
    assert not described


# ---- what a deviation does


def _hostile(**settings: Any) -> tuple[Any, Any]:
    scale = Hidden(2.0)
    step: Any = tarry.compile(lambda x: x * scale.value, **settings)
    for _ in range(7):
        assert step(ones(2)).tolist() == [2.0, 2.0]
    return scale, step


def test_the_error_says_what_and_where_and_which_calls() -> None:
    scale, step = _hostile()
    scale.value = 3.0
    for _ in range(4):
        assert step(ones(2)).tolist() == [2.0, 2.0]  # stale
    with pytest.raises(tarry.ReplayError, match="4 calls, 8 to 11, were replayed since call 7") as caught:
        step(ones(2))
    error = caught.value
    assert error.operator == "aten::mul.Tensor"
    assert error.where is not None
    assert "test_verification.py:" in error.where
    assert (error.before, error.now, error.call, error.last_verified) == (2.0, 3.0, 12, 7)
    assert "was 2.0 and is 3.0 now" in step.explain()
    for _ in range(20):  # as if it were new
        assert step(ones(2)).tolist() == [3.0, 3.0]
    assert step.replays > 7


def test_a_warning_and_no_replay_any_more() -> None:
    scale, step = _hostile(on_deviation="warn")
    scale.value = 3.0
    with pytest.warns(UserWarning, match="From now on, every call is recorded") as caught:
        found = [step(ones(2)).tolist()[0] for _ in range(12)]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert found == [2.0] * 4 + [3.0] * 8
    for value in (4.0, 5.0):
        scale.value = value
        assert step(ones(2)).tolist() == [value, value]
    assert step.replays == 7
    assert "every call is recorded since then" in step.explain()


def test_with_every_call_verified_a_deviation_is_told_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    scale, step = _hostile(verify=1)
    scale.value = 3.0
    assert step(ones(2)).tolist() == [3.0, 3.0]
    assert "was 2.0 and is 3.0 now" in step.explain()
    assert "was 2.0 and is 3.0 now" in caplog.text


def test_an_exception_has_the_next_call_verified() -> None:
    fails = Hidden(False)
    scale = Hidden(2.0)

    def function(x: Tensor) -> Tensor:
        if fails.value:
            raise KeyError("mine")
        return x * scale.value

    step = tarry.compile(function)
    for _ in range(11):
        step(ones(2))
    fails.value = True
    with pytest.raises(KeyError, match="mine"):
        step(ones(2))
    fails.value = False
    scale.value = 3.0
    with pytest.raises(tarry.ReplayError, match="4 calls, 8 to 11"):
        step(ones(2))


def test_an_exception_says_which_calls_were_replayed() -> None:
    fails = Hidden(False)

    def function(x: Tensor) -> Tensor:
        if fails.value:
            raise KeyError("mine")
        return x * 2

    step = tarry.compile(function)
    for _ in range(11):
        step(ones(2))
    fails.value = True
    with pytest.raises(KeyError, match="mine") as caught:
        step(ones(2))
    assert "4 calls, 8 to 11, were replayed since call 7" in caught.value.__notes__[0]


def test_a_size_is_returned_as_what_it_is() -> None:
    step = tarry.compile(lambda x: (x * 2, x.shape))
    for _ in range(5):
        assert type(step(ones(2))[1]) is torch.Size
    assert step.replays == 2, step.explain()


def test_another_plan_is_verified_when_it_comes_back() -> None:
    scale = Hidden(2.0)
    step = tarry.compile(lambda x: x * scale.value)
    for size in (2, 2, 2, 2, 2, 3, 3, 3):
        step(ones(size))
    scale.value = 3.0
    with pytest.raises(tarry.ReplayError):
        step(ones(2))


def test_the_error_in_an_update_leaves_what_the_recorded_call_did() -> None:
    weight, scale = ones(2), Hidden(1.0)

    def function(x: Tensor) -> None:
        weight.add_(x, alpha=scale.value)

    step = tarry.compile(function)
    for _ in range(11):
        step(ones(2))
    scale.value = 10.0
    with pytest.raises(tarry.ReplayError, match="'alpha' of aten::add_"):
        step(ones(2))
    assert weight.tolist() == [22.0, 22.0]


# ---- what is no deviation


def test_training_that_keeps_to_the_contract_never_raises() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).to("tarry")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))

    def function(x: Tensor, y: Tensor, update: bool) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    step = tarry.compile(function)
    for k in range(400):
        step(torch.randn(4, 3).to("tarry"), torch.randn(4, 2).to("tarry"), k % 4 == 3)
        if k % 50 == 49:
            model.train(not model.training)
        if k % 4 == 3:
            scheduler.step()
    assert step.verified > 8, step.explain()
    assert step.replays > 250, step.explain()


def test_cycles_that_the_garbage_collector_has_not_freed_yet() -> None:
    class Node:
        pass

    def function(x: Tensor) -> Tensor:
        node: Any = Node()
        node.self, node.kept = node, x * 3  # dead after the call, and freed whenever
        return x * 2

    step = tarry.compile(function)
    thresholds = gc.get_threshold()
    try:
        for k in range(60):
            gc.set_threshold(*((1, 1, 1) if k % 3 == 0 else (100000, 1, 1)))
            step(ones(2))
    finally:
        gc.set_threshold(*thresholds)
    assert step.replays > 20, step.explain()


def test_state_that_was_replaced_where_no_guard_looks() -> None:
    """A replay would have found the old one gone, and said no."""
    hidden = Hidden(ones(2))
    step = tarry.compile(lambda x: x * hidden.value)
    for k in range(40):
        if k % 7 == 6:
            hidden.value = torch.full((2,), float(k), device="tarry")
        assert torch.equal(step(ones(2)).cpu(), hidden.value.cpu())


def test_another_thread_that_records_is_no_deviation() -> None:
    step = tarry.compile(lambda x: (x * 2).sum(), verify=None)
    over = threading.Event()
    failures: list[BaseException] = []

    def other() -> None:
        try:
            while not over.is_set():
                (ones(3) * torch.ones(3).to("tarry")).sum().item()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        for _ in range(200):
            assert step(ones(4)).item() == 8.0
    finally:
        over.set()
        thread.join(60)
    assert not failures
