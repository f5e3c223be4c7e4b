"""The object that tarry.compile gives: decorator, method, threads, errors, counts."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tarry
from tests.replay.training import batches, replayed, trainer
from tests.support import tarry_only
from tests.support.threads import on_threads

USES_DEVICE = True
pytestmark = tarry_only


def ones(*sizes: int) -> Tensor:
    return torch.ones(*sizes, device="tarry")


def test_a_decorator_with_and_without_arguments() -> None:
    @tarry.compile(verify=0)
    def double(x: Tensor) -> Tensor:
        """Twice as much."""
        return x * 2

    @tarry.compile(warm_up=1, verify=0)
    def triple(x: Tensor) -> Tensor:
        return x * 3

    assert double.__name__ == "double"
    assert double.__doc__ == "Twice as much."
    for k in range(4):
        assert double(ones(1) * k).item() == 2 * k
        assert triple(ones(1) * k).item() == 3 * k
    assert (double.recorded, double.replays) == (2, 2)
    assert (triple.recorded, triple.replays) == (1, 3)


@pytest.mark.parametrize(("arguments", "error"), [((3,), TypeError), ((), None)])
def test_wrong_arguments(arguments: tuple[object, ...], error: type[Exception] | None) -> None:
    if error is not None:
        with pytest.raises(error, match="takes a function"):
            tarry.compile(*arguments)
    with pytest.raises(ValueError, match="1 or more"):
        tarry.compile(lambda x: x, warm_up=0, verify=0)


class Model:
    """A step function that is a method."""

    def __init__(self, factor: float) -> None:
        self.weight = torch.full((2,), factor, device="tarry", requires_grad=True)
        self.factor = factor
        self.calls = 0

    @tarry.compile(verify=0)
    def step(self, x: Tensor) -> Tensor:
        self.weight.grad = None
        loss = (self.weight * x * self.factor).sum()
        loss.backward()
        with torch.no_grad():
            self.weight.sub_(self.weight.grad, alpha=0.1)
        return loss.detach()


def test_methods_have_replays_of_their_own() -> None:
    first, second = Model(1.0), Model(2.0)
    for k in range(6):
        for model in (first, second):
            before = model.weight.detach().cpu()
            assert model.step(ones(2)).item() == pytest.approx((before * model.factor).sum().item())
            torch.testing.assert_close(model.weight.detach().cpu(), before - 0.1 * model.factor)
            model.calls += k  # not read by the step
    assert first.step.replays == second.step.replays == 3
    second.factor = 4.0
    before = second.weight.detach().cpu()
    assert second.step(ones(2)).item() == pytest.approx((before * 4.0).sum().item())
    assert second.step.recorded == 4
    assert first.step.recorded == 3


class Net(nn.Module):
    """A module whose step function is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    @tarry.compile(verify=0)
    def predict(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(x)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_of_a_module_have_replays_of_their_own(duplicate: Callable[[Net], Net]) -> None:
    net = Net().to("tarry")
    for _ in range(3):
        net.predict(ones(1, 2))
    other = duplicate(net)
    other.layer.weight.data.zero_()
    for _ in range(4):
        assert net.predict(ones(1, 2)).tolist() != other.predict(ones(1, 2)).tolist()
    assert torch.equal(other.predict(ones(1, 2)).cpu()[0], other.layer.bias.detach().cpu())
    assert net.predict.replays == 5
    assert other.predict.replays == 3


def test_a_function_can_be_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(module_level)) is module_level


@tarry.compile(verify=0)
def module_level(x: Tensor) -> Tensor:
    return x * 2


def test_an_object_without_room_for_replays() -> None:
    class Slotted:
        __slots__ = ()

        @tarry.compile(verify=0)
        def step(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(TypeError, match="has __slots__"):
        Slotted().step(ones(1))


def test_surroundings_that_cannot_be_looked_at() -> None:
    class Shy:
        @property
        def __dict__(self) -> dict[str, object]:  # type: ignore[override]
            raise RuntimeError("no")

    shy = Shy()
    step = tarry.compile(lambda x: x * 2 if shy is not None else x, verify=0)
    for _ in range(3):
        assert step(ones(1)).item() == 2
    assert step.replays == 0
    assert "cannot be looked at: RuntimeError: no" in step.explain()


def test_results_of_any_structure() -> None:
    class Point:
        pass

    point = Point()

    def function(x: Tensor, y: Tensor) -> dict[str, object]:
        total = x + y
        return {"sum": total, "part": total[1:], "list": [y, None, "text", 3], "same": point, "row": x.view(1, -1)}

    step = tarry.compile(function, verify=0)
    for k in range(5):
        x, y = ones(3) * k, ones(3)
        result = step(x, y)
        assert result["sum"].tolist() == [k + 1.0] * 3
        assert result["part"].tolist() == [k + 1.0] * 2
        assert result["list"][0] is y
        assert result["list"][1:] == [None, "text", 3]
        assert result["same"] is point
        result["row"].add_(1)
        assert x.tolist() == [k + 1.0] * 3
    assert step.replays == 3
    result["sum"].zero_()
    assert result["part"].tolist() == [0.0, 0.0]


def test_an_error_in_the_function_is_the_functions() -> None:
    fail = [False]

    def function(x: Tensor) -> Tensor:
        if fail[0]:
            raise ValueError("no")
        return x * 2

    step = tarry.compile(function, verify=0)
    for _ in range(3):
        step(ones(2))
    fail[0] = True
    with pytest.raises(ValueError, match="no"):
        step(ones(2))
    fail[0] = False
    assert step(ones(2)).tolist() == [2.0, 2.0]
    assert step.replays == 2


@pytest.mark.parametrize("backend", ["eager", "torchscript"])
def test_an_error_in_a_replay_names_the_line(backend: str) -> None:
    tarry.set_backend(backend)
    try:
        table = nn.Embedding(4, 2).to("tarry")

        def function(x: Tensor) -> Tensor:
            return table(x).sum().detach()  # the line

        step = tarry.compile(function, verify=0)
        for _ in range(4):
            step(torch.tensor([1, 2], device="tarry"))
        with pytest.raises(IndexError, match=r"test_function\.py"):
            step(torch.tensor([1, 9], device="tarry")).cpu()
        expected = table.weight.detach().cpu()[[1, 2]].sum()
        for _ in range(3):
            torch.testing.assert_close(step(torch.tensor([1, 2], device="tarry")).cpu(), expected)
    finally:
        tarry.set_backend("eager")


def test_a_compiled_function_in_a_compiled_function() -> None:
    inner = tarry.compile(lambda x: x * 2, verify=0)
    outer = tarry.compile(lambda x: inner(x) + 1, verify=0)
    for k in range(5):
        assert outer(ones(1) * k).item() == 2 * k + 1
    assert (outer.replays, inner.replays, inner.recorded) == (3, 0, 0)
    for k in range(4):
        assert inner(ones(1) * k).item() == 2 * k
    assert inner.replays == 2


def test_what_is_pending_is_computed_first() -> None:
    weight = ones(2)
    step = tarry.compile(lambda x: weight * x, verify=0)
    for _ in range(3):
        step(ones(2))
    weight.add_(1)
    x = ones(2) * 3
    assert step(x).tolist() == [6.0, 6.0]
    assert step.replays == 2


def test_threads() -> None:
    watched = trainer()
    step = replayed(watched)
    data = batches(8, device="tarry")

    def work() -> None:
        for x, y in data:
            assert step(x, y).item() > 0

    on_threads(work)
    assert step.replays + step.recorded == 4 + 3 * len(data)


def test_another_thread_records_meanwhile() -> None:
    watched, eager = trainer("tarry"), trainer("cpu")
    step = tarry.compile(watched.step, verify=0)
    stop = threading.Event()

    def work() -> None:
        x = ones(3)
        while not stop.is_set():
            x = (x + 1).clamp(max=5)
            total = (watched.model[0].weight.detach() * 2).sum() + x.sum()  # reads what a step in flight writes
            if stop.wait(1e-4):
                total.item()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for x, y in batches(100):
            torch.testing.assert_close(step(x.to("tarry"), y.to("tarry")).cpu(), eager.step(x, y), rtol=1e-4, atol=1e-5)
    finally:
        stop.set()
        thread.join()
    torch.testing.assert_close(watched.state(), eager.state(), rtol=1e-4, atol=1e-5)


def test_counts_events_and_explanation() -> None:
    step = tarry.compile(lambda x: x * 2, verify=0)
    assert "has not been called" in step.explain()
    step(ones(2))
    assert "not replayed yet" in step.explain()
    with tarry.events.record() as seen:
        for _ in range(3):
            step(ones(2))
    assert [event.kind for event in seen].count("replay") == 2
    step(ones(3))
    counters = tarry.metrics.counters()
    assert counters["replay"] == 2
    assert counters["replay_guard_failed"] == 1
    assert "replayed for (float32[2]): 1 operators" in step.explain()
    assert "no call with such arguments was replayed before: float32[3]" in step.explain()
    assert "3 calls recorded, 2 replayed" in repr(step)


def test_inference_is_replayed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1)).to("tarry").eval()

    @tarry.compile(verify=0)
    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        return model(x)

    for _ in range(5):
        x = torch.randn(2, 3)
        expected = F.softmax(x @ model[0].weight.detach().cpu().t() + model[0].bias.detach().cpu(), -1)
        torch.testing.assert_close(predict(x.to("tarry")).cpu(), expected)
    assert predict.replays == 3
