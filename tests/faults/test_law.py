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
from tarry.native import C

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


def _run(*calls: Callable[[], Any]) -> None:
    for call in calls:
        call()


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
    "copy_ from the host": lambda x: x.copy_(torch.ones(2)),
    "normal_": lambda x: x.normal_(),
    "view": lambda x: x[:1].mul_(2),
    "out": lambda x: torch.neg(torch.ones(2, device="tarry"), out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 3.0),
    "foreach zero": lambda x: torch._foreach_zero_([x]),
    "several": lambda x: x.fill_(1).copy_(x * 2).zero_().add_(1),
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
    assert x.tolist() == [7.0, 8.0]


OVERWRITES: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda x: x.copy_(_bad()),
    "all of a slice": lambda x: x.__setitem__(slice(None), _bad()),
    "out": lambda x: torch.neg(_bad(), out=x),
    "fill_": lambda x: x.fill_(_bad().sum()),
    "masked_fill_": lambda x: x.masked_fill_(_bad() > 0, 3.0),
    "foreach copy": lambda x: torch._foreach_copy_([x], [_bad()]),
    "its own data": lambda x: x.bernoulli_(_data(2, 0.5) * 1),
    "a division": lambda x: x.copy_((_data(1, 1).long() * 1) // _data(0, 1).long()),
}


@pytest.mark.parametrize("overwrite", OVERWRITES.values(), ids=OVERWRITES)
@pytest.mark.parametrize("made", ["by the step", "before"])
def test_contents_that_a_failing_operator_would_have_overwritten(overwrite: Callable[[Tensor], Any], made: str) -> None:
    x = torch.full((2,), 6.0, device="tarry") if made == "by the step" else _data(6, 6)
    x.add_(1)
    overwrite(x)
    with pytest.raises((IndexError, RuntimeError)):
        tarry.sync()
    x += 1
    assert x.tolist() == [8.0, 8.0]


def test_a_parameter_that_is_pending_when_its_first_step_fails() -> None:
    weight = nn.Parameter(torch.full((2,), 3.0, device="tarry"))
    with torch.no_grad():
        weight.fill_(2.0)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    (weight * _bad()).sum().backward()
    with pytest.raises(IndexError):
        _run(optimizer.step, tarry.sync)
    assert weight.tolist() == [2.0, 2.0]


def test_contents_that_no_failure_brings_back_are_not_computed() -> None:
    tarry.sync()
    x = torch.ones(2, device="tarry").exp()
    x.normal_()
    assert "aten::exp(" not in str(tarry.graph(x, stage="recorded"))
    _kept = _data(1, 2)[torch.tensor([1]).to("tarry")]  # an index: it may fail
    y = torch.ones(2, device="tarry").exp()
    y.normal_()
    z = torch.ones(2, device="tarry").exp()
    z.copy_(_kept)
    assert "aten::exp(" in str(tarry.graph(y, z, stage="recorded"))
    assert "aten::exp(" not in str(tarry.graph(y, z, stage="optimized"))


def test_a_tensor_that_is_overwritten_twice_keeps_its_contents() -> None:
    x = _data(7, 8)
    x.copy_(_bad())
    x.copy_(x * 2)
    with pytest.raises(IndexError):
        tarry.sync()
    assert x.tolist() == [7.0, 8.0]


def test_a_tensor_keeps_its_shape_if_pending_work_fails_when_it_is_resized() -> None:
    t = _data(1, 2) + 1
    _kept = _bad()
    with pytest.raises(IndexError):
        t.resize_(3, 3)
    assert (t.shape, t.tolist()) == ((2,), [2.0, 3.0])
    assert t.resize_(3, 3).shape == (3, 3)


# ---- threads


def test_another_threads_write_in_between_saves_nothing() -> None:
    w = _data(0, 0)
    _kept = _bad()
    _on_thread(lambda: w.add_(1))
    w.mul_(100)
    with pytest.raises(IndexError):
        tarry.sync()
    assert w.tolist() == [1.0, 1.0]


def test_another_threads_overwrite_is_not_taken_back() -> None:
    tarry.sync()
    x, y = torch.ones(2, device="tarry") * 3, torch.ones(2, device="tarry") * 3
    failed = _bad()
    _on_thread(lambda: x.fill_(5))
    _on_thread(lambda: y.copy_(failed))
    x.mul_(7)
    with pytest.raises(IndexError):
        tarry.sync()
    assert (x.tolist(), y.tolist()) == ([5.0, 5.0], [3.0, 3.0])


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.fill_(7),
        lambda w: w.add_(1),
        lambda w: w[:1].zero_(),
        lambda w: w.copy_(torch.ones(2)),  # from the host
        lambda w: torch.add(w, 1, out=w),
        lambda w: torch._foreach_zero_([w]),
    ],
)
def test_no_write_follows_a_failure_that_another_thread_has_found(write: Callable[[Tensor], Any]) -> None:
    w = _data(0, 0)
    _kept = _bad()
    _on_thread(tarry.sync)
    with pytest.raises(IndexError):
        write(w)
    assert w.tolist() == [0.0, 0.0]
    write(w)  # the error was raised
    w.add_(1)
    assert w.tolist() != [0.0, 0.0]


def test_a_replay_that_fails_has_the_contents_from_before() -> None:
    state, table = _data(0, 0), torch.arange(8.0).view(4, 2).to("tarry")

    @tarry.compile
    def step(index: Tensor) -> Tensor:
        state.add_(1)
        state.copy_(table[index].sum(0))
        return state * 1

    right, wrong = torch.tensor([1]).to("tarry"), torch.tensor([9]).to("tarry")
    for _ in range(6):
        assert step(right).tolist() == [2.0, 3.0]
    with pytest.raises(IndexError):
        _run(lambda: step(wrong).cpu())
    assert state.tolist() == [3.0, 4.0]  # the addition came first


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


class Interrupted(Counting):
    """Something happens in the middle of its step."""

    between: Callable[[], None] = staticmethod(lambda: None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        self.state[p]["count"] = self.state[p].get("count", 0)
        self.between()
        self.state[p]["count"] += 1
        p.sub_(p.grad)


def test_another_thread_that_finds_a_failure_leaves_a_running_step_alone() -> None:
    weight, other = nn.Parameter(_data(1.0, 2.0)), nn.Parameter(_data(1.0))
    optimizer, others = Interrupted([weight]), Counting([other])

    def compute() -> None:
        other.grad = other + 1
        others.step()

    optimizer.between = lambda: _on_thread(compute)  # type: ignore[method-assign]
    weight.grad = _bad()
    with pytest.raises(IndexError):
        optimizer.step()
    weight.grad = _data(1.0, 1.0)
    optimizer.step()
    assert weight.tolist() == [0.0, 1.0]
    assert optimizer.state[weight]["count"] == 1


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


# ---- errors of Python's


class _Holds:
    """Something large that a kernel has in a variable."""


@pytest.fixture
def kernel() -> Iterator[tuple[Callable[[Tensor], Tensor], list[BaseException]]]:
    """An operator with a kernel in Python, and the errors that it is to raise, one in each call."""
    errors: list[BaseException] = []
    library = torch.library.Library("tarry_law", "FRAGMENT")
    library.define("raises(Tensor x) -> Tensor")

    def raises(x: Tensor) -> Tensor:
        held = _Holds()
        if errors:
            raise errors.pop()
        assert held
        return x * 2

    library.impl("raises", raises, "CPU")
    library.impl("raises", torch.empty_like, "Meta")
    yield torch.ops.tarry_law.raises, errors
    library._destroy()


def test_a_failure_keeps_nothing_that_its_kernel_held(
    kernel: tuple[Callable[[Tensor], Tensor], list[BaseException]],
) -> None:
    call, errors = kernel
    errors.extend([KeyError("no such thing")] * 2)  # a compiled program, then the reference path
    made = call(_data(1, 2))
    for _ in range(2):
        with pytest.raises(KeyError, match="no such thing") as caught:
            made.cpu()
        notes = "".join(caught.value.__notes__)
        assert "tarry_law::raises" in notes
        assert "raise errors.pop()" in notes, "where in the kernel"
        del caught
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is _Holds]


def test_an_interrupt_in_a_kernel_loses_nothing(
    kernel: tuple[Callable[[Tensor], Tensor], list[BaseException]],
) -> None:
    call, errors = kernel
    data = _data(1, 2)
    for _ in range(3):  # compiled by then
        made, other = call(data + 1), data + 5
        assert made.tolist() == [4.0, 6.0]
    made, other = call(data + 1), data + 5
    errors.append(KeyboardInterrupt("stop"))
    with pytest.raises(KeyboardInterrupt):
        made.cpu()
    assert (made.tolist(), other.tolist()) == ([4.0, 6.0], [6.0, 7.0])


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


def test_older_contents_do_not_stand_for_those_that_were_dropped() -> None:
    """Wherever a failure comes that no table foresees: what `copy_` dropped uncomputed was 3, and is not 2 again."""
    for after in range(8):
        x = torch.full((4,), 2.0).to("tarry")
        x.add_(1)
        x.copy_(torch.ones(4).to("tarry") * 5)
        x.fill_(7.0)
        C.arm_fault(1, after)
        try:
            tarry.sync(x)
        except ValueError:
            with pytest.raises(ValueError, match="injected"):
                x.tolist()
        else:
            assert x.tolist() == [7.0] * 4
        finally:
            C.disarm_fault()
