"""The law of failure, as programs meet it: threads, optimizers, writes after a failure, every path of reading."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tarry

USES_DEVICE = True


@pytest.fixture(params=["eager", "torchscript"], autouse=True)
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    tarry.set_backend(request.param)
    yield
    tarry.set_backend("eager")


def _data(*values: float) -> Tensor:
    made = torch.tensor(values, dtype=torch.float32).to("tarry")
    tarry.sync()
    return made


def _bad() -> Tensor:
    return torch.arange(4.0).to("tarry")[torch.tensor([7, 1]).to("tarry")]


def _on_thread(work: Callable[[], Any]) -> Any:
    """What the function gives, or the error that it raises."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return outcome[0]


READS: dict[str, Callable[[Tensor], Any]] = {
    "cpu": lambda t: t.cpu(),
    "item": lambda t: t[0].item(),
    "tolist": lambda t: t.tolist(),
    "print": repr,
    "cast": lambda t: t.double().cpu(),
    "cast and move": lambda t: t.to("cpu", torch.float64),
    "clone": lambda t: t.clone().cpu(),
    "view": lambda t: t.view(2, 1).cpu(),
    "transposed copy": lambda t: t[None].t().contiguous().cpu(),
    "cat": lambda t: torch.cat([t, t]).cpu(),
    "data": lambda t: t.data.cpu(),
    "detach": lambda t: t.detach().numpy(force=True),
    "deepcopy": lambda t: copy.deepcopy(t).cpu(),
    "save": lambda t: torch.save(t, io.BytesIO()),
    "copy_": lambda t: torch.zeros(2).to("tarry").copy_(t).cpu(),
    "out": lambda t: torch.add(t, 1, out=torch.zeros(2).to("tarry")).cpu(),
    "in place": lambda t: t.add_(1).cpu(),
    "part of it written": lambda t: t[:1].fill_(1).cpu(),
    "truth": lambda t: bool(t.sum()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_read_raises_the_same_type_until_it_is_overwritten(read: Callable[[Tensor], Any]) -> None:
    made = _bad() * 2
    for _ in range(2):
        with pytest.raises(IndexError, match="out of bounds"):
            read(made)
    made.copy_(torch.ones(2).to("tarry"))
    assert made.tolist() == [1.0, 1.0]


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(3),
    "copy_": lambda x: x.copy_(torch.ones(2, device="tarry") * 5),
    "view": lambda x: x[:1].mul_(2),
    "out": lambda x: torch.neg(torch.ones(2, device="tarry"), out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 3.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("pending", [False, True], ids=["data", "pending"])
def test_writes_after_a_failure_do_not_happen(write: Callable[[Tensor], Any], pending: bool) -> None:
    x = _data(7, 8)
    if pending:
        x = x * 1
    _kept = _bad()
    write(x)
    with pytest.raises(IndexError):
        tarry.sync()
    try:
        assert x.tolist() == [7.0, 8.0]
    except IndexError:
        assert pending, "what was computed already must not be lost"


def test_a_tensor_that_is_overwritten_twice_keeps_its_contents() -> None:
    x = _data(7, 8)
    x.copy_(_bad())
    x.copy_(x * 2)
    with pytest.raises(IndexError):
        tarry.sync()
    assert x.tolist() == [7.0, 8.0]


# ---- threads


def test_another_threads_write_in_between_saves_nothing() -> None:
    w = _data(0, 0)
    _kept = _bad()
    _on_thread(lambda: w.add_(1))
    w.mul_(100)
    with pytest.raises(IndexError):
        tarry.sync()
    assert w.tolist() == [1.0, 1.0]


def test_a_thread_that_computes_with_what_another_failed_to_compute_is_told() -> None:
    total, weight = _data(5), nn.Parameter(_data(1, 1))
    optimizer = torch.optim.Adam([weight])
    value = _on_thread(lambda: _bad().sum())
    total.add_(value)
    (weight * value).sum().backward()
    with pytest.raises(IndexError):
        optimizer.step()
    assert (total.tolist(), weight.tolist()) == ([5.0], [1.0, 1.0])
    assert not optimizer.state


def test_an_error_comes_up_in_its_own_thread_only() -> None:
    mine = _data(1, 2)
    _lost = _on_thread(_bad)
    assert (mine + 1).tolist() == [2.0, 3.0]
    assert isinstance(_on_thread(lambda: _lost.cpu()), IndexError)


# ---- optimizers


class Counting(torch.optim.Optimizer):
    """Keeps numbers on the host wherever it can."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                self.state["all"]["seen"] = [*self.state["all"].get("seen", []), group["steps"]]
                p.sub_(p.grad, alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "counting": Counting,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_failure_takes_back_its_own_step_only(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def train(device: str) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(4, 3).to(device)
        optimizer = make(net.parameters())
        for step in range(24):  # nothing is read: steps may be handed over, and the next one is pending
            bad = step in (12, 20)
            x, y = torch.randn(5, 4).to(device), torch.full((5,), 9 if bad else step % 3).to(device)
            try:
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                if bad:
                    tarry.wait()
            except IndexError:
                assert bad
        tarry.wait()
        numbers = [group.get("steps") for group in optimizer.param_groups]
        entries = [(k, v) for entry in optimizer.state.values() for k, v in sorted(entry.items())]
        values = [v.cpu() if isinstance(v, Tensor) else torch.tensor(v) for _, v in entries if v is not None]
        return [*(p.detach().cpu() for p in net.parameters()), *values], numbers

    mine, others = train("tarry"), train("cpu")
    torch.testing.assert_close(mine[0], others[0])
    assert mine[1] == others[1]


def test_gradients_are_unscaled_after_a_failed_step() -> None:
    def train(device: str) -> Tensor:
        weight = nn.Parameter(torch.ones(2, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for index in (1, 9, 2):
            try:
                optimizer.zero_grad()
                picked = torch.arange(4.0).to(device)[torch.tensor([index, 1]).to(device)]
                scaler.scale((weight * picked).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            except IndexError:
                assert index == 9
        return weight.detach().cpu()

    torch.testing.assert_close(train("tarry"), train("cpu"))


# ---- around it


def test_an_interrupt_just_before_a_step_leaves_the_device_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _data(1, 2) + 1

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt):
        x.cpu()
    assert x.tolist() == [2.0, 3.0]
    assert gc.isenabled()


def test_a_change_of_the_backend_does_not_swallow_an_error() -> None:
    x = _data(1, 2)
    x.add_(_bad())
    with pytest.raises(IndexError):
        tarry.set_backend("eager")
    assert x.tolist() == [1.0, 2.0]
