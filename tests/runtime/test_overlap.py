"""A step is computed while the next one is recorded: values are eager's, reads wait, and errors are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tarry
from tarry.errors import BackendError
from tarry.native import C
from tarry.runtime.program import Program
from tests.support.threads import on_threads

USES_DEVICE = True
WIDTH, ROWS = 64, 128
"""A step takes so long that handing it over is worth while; see kBrief in csrc/execute/executor.cpp."""


@pytest.fixture(autouse=True)
def _torchscript() -> Iterator[None]:
    tarry.set_backend("torchscript")
    C.reset_counters(0)
    yield
    tarry.config.run_ahead = True
    tarry.set_backend("eager")


def _submitted() -> int:
    return int(C.counters(0).get("handed_over", 0))


def _overlapped() -> int:
    return int(C.counters(0).get("overlapped", 0))


class Net(nn.Module):
    """Deep enough to come in two parts; BatchNorm's statistics are results of the forward pass, updated in place."""

    def __init__(self, width: int = WIDTH, layers: int = 6, norm: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.norm(x)
        return out


After = Callable[[int, Net, Tensor], Any]


def _train(device: str, after: After, steps: int = 12, *, layers: int = 6, keep_gradients: bool = False) -> list[Any]:
    """What `after(step, net, loss)` gives, which is called when a step has been cut, then the state."""
    torch.manual_seed(0)
    net = Net(layers=layers).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH).to(device)
        if not keep_gradients or step % 3 == 0:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = net(x).pow(3).mean()
        loss.backward()
        optimizer.step()
        seen.append(after(step, net, loss.detach()))
    return [*seen, *(value.cpu() for value in net.state_dict().values())]


def _assert_as_eager(after: After, **program: Any) -> None:
    C.reset_counters(0)
    mine = _train("tarry", after, **program)
    assert _submitted() > 0
    torch.testing.assert_close(mine, _train("cpu", after, **program))
    tarry.config.run_ahead = False
    before = _submitted()
    again = _train("tarry", after, **program)
    assert _submitted() == before
    torch.testing.assert_close(again, mine, rtol=0, atol=0)


# ---- that it happens


def test_a_step_is_computed_while_the_next_one_is_recorded() -> None:
    net = Net(width=512, layers=4).to("tarry")  # milliseconds, where recording an operator takes microseconds
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(512, 512).to("tarry")
    for _ in range(8):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    tarry.wait()
    assert _submitted() >= 4
    assert _overlapped() >= 1


def test_a_loop_that_never_reads_is_computed_while_it_is_recorded() -> None:
    """A step that is cut for the memory it holds: no value is needed, and none may be waited for."""
    net = Net(width=256, layers=4, norm=False).to("tarry")
    total = torch.zeros((), device="tarry")
    with torch.no_grad(), tarry.config.override(max_pending_bytes=1 << 20):
        for _ in range(64):
            total += net(torch.ones(256, 256).to("tarry")).sum()
    assert _submitted() >= 4
    assert _overlapped() >= 1


def test_it_can_be_turned_off() -> None:
    tarry.config.run_ahead = False
    _train("tarry", lambda step, net, loss: None)
    assert _submitted() == 0


def test_a_step_that_is_asked_for_at_once_is_not_handed_over_for_long() -> None:
    net = Net(width=512, layers=4).to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(20):
        net(torch.ones(512, 512).to("tarry")).square().mean().backward()
        optimizer.step()
        net.layers[0].weight[0, 0].item()
    assert 1 <= _submitted() < 20  # how many depends on who was faster


def test_a_loss_is_read_while_the_rest_of_its_step_is_computed() -> None:
    net = Net(width=512).to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.ones(512, 512).to("tarry")
    in_flight = []
    for _ in range(8):
        C.forget_speculations()  # and that steps were waited for at once
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        early = [loss.item(), loss.cpu().item(), loss.view(1).to("cpu")[0].item()]
        in_flight.append(C.is_in_flight(0))  # reading it has not finished the step, which takes milliseconds
        tarry.wait()
        assert early == [loss.item()] * 3
    assert any(in_flight)


def test_wait_means_that_it_is_done() -> None:
    net = Net(width=256).to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for finish in (lambda: tarry.mark_step(wait=True), tarry.wait, torch.tarry.synchronize, tarry.sync):  # type: ignore[attr-defined]
        net(torch.ones(256, 256).to("tarry")).sum().backward()
        optimizer.step()
        finish()
        assert not C.is_in_flight(0)


def test_a_second_cut_does_not_wait_for_the_first() -> None:
    net = Net(width=512).to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(4):
        net(torch.ones(512, 512).to("tarry")).sum().backward()
        optimizer.step()
        with tarry.events.expect(syncs=0):
            tarry.mark_step()


# ---- values


@pytest.mark.parametrize("layers", [6, 1], ids=["in two parts", "whole"])
def test_the_loss_read_every_few_steps(layers: int) -> None:
    _assert_as_eager(lambda step, net, loss: loss.item() if step % 5 == 4 else None, layers=layers)


def test_the_loss_read_in_each_step() -> None:
    _assert_as_eager(lambda step, net, loss: loss.item())


def test_losses_kept_and_read_later() -> None:
    kept: list[Tensor] = []

    def keep(step: int, net: Net, loss: Tensor) -> list[float] | None:
        kept.append(loss)
        if step != 11:
            return None
        values = [value.item() for value in kept]
        kept.clear()
        return values

    _assert_as_eager(keep)


def test_a_running_sum_of_the_losses() -> None:
    """An operator on a result of the step in flight: the thread that records it waits."""
    sums: list[Tensor] = []

    def add(step: int, net: Net, loss: Tensor) -> float | None:
        sums[:] = [sums[0] + loss if step else loss * 1]
        return sums[0].item() if step % 4 == 3 else None

    _assert_as_eager(add)


def test_gradients_read_after_the_step() -> None:
    def read(step: int, net: Net, loss: Tensor) -> Tensor | None:
        gradient = net.layers[0].weight.grad
        assert gradient is not None
        return gradient.clone().cpu() if step % 3 else gradient.norm().cpu()

    _assert_as_eager(read)


def test_gradients_that_are_accumulated_over_steps() -> None:
    _assert_as_eager(lambda step, net, loss: None, keep_gradients=True)


def test_parameters_read_after_the_step() -> None:
    def read(step: int, net: Net, loss: Tensor) -> list[Tensor]:
        return [net.layers[0].weight.detach().cpu().clone(), torch.tensor(net.norm.running_mean.tolist())]  # type: ignore[union-attr,operator]

    _assert_as_eager(read)


def test_parameters_cloned_after_the_step() -> None:
    copies: list[Tensor] = []

    def clone(step: int, net: Net, loss: Tensor) -> list[Tensor] | None:
        copies.append(net.layers[0].weight.detach().clone())
        if step != 11:
            return None
        read = [copy.cpu() for copy in copies]
        copies.clear()
        return read

    _assert_as_eager(clone)


def test_parameters_written_after_the_step() -> None:
    def write(step: int, net: Net, loss: Tensor) -> None:
        with torch.no_grad():
            net.layers[0].weight.copy_(torch.full((WIDTH, WIDTH), 0.001 * step))  # a new buffer, from the host
            net.layers[1].weight[0].copy_(torch.full((WIDTH,), 0.002 * step))  # a part of one
            net.layers[2].weight.mul_(0.9)
            net.layers[3].weight.data = net.layers[3].weight.data * 0.9
        if step % 4 == 3:
            net.load_state_dict({name: value.cpu() * 0.99 for name, value in net.state_dict().items()})

    _assert_as_eager(write)


def test_a_moving_average_of_the_parameters() -> None:
    average: list[Tensor] = []

    def follow(step: int, net: Net, loss: Tensor) -> Tensor | None:
        weight = net.layers[0].weight.detach()
        if step == 0:
            average[:] = [weight.clone()]
        average[0].lerp_(weight, 0.1)
        return average[0].cpu().clone() if step % 5 == 4 else None

    _assert_as_eager(follow)


def test_an_operator_that_runs_eagerly_on_a_parameter() -> None:
    def count(step: int, net: Net, loss: Tensor) -> int:
        return len(net.layers[0].weight.detach().nonzero())

    _assert_as_eager(count)


def test_two_models_that_take_turns() -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        nets = [Net().to(device), Net(layers=3).to(device)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in nets]
        losses = []
        for step in range(10):
            x = torch.randn(ROWS, WIDTH).to(device)
            for net, optimizer in zip(nets, optimizers, strict=True):
                x = net(x).detach()
                loss = net(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if step % 3 == 2:
                losses.append(loss.detach().cpu())
        return [*losses, *(value.cpu() for net in nets for value in net.state_dict().values())]

    torch.testing.assert_close(train("tarry"), train("cpu"))
    assert _submitted() > 0


def test_an_exception_in_the_program_between_steps() -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = Net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(8):
            try:
                loss = net(torch.randn(ROWS, WIDTH).to(device)).square().mean()
                if step % 3 == 1:
                    raise KeyError(step)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            except KeyError:
                net.layers[0].weight.detach().mul_(0.5)
        return [value.cpu() for value in net.state_dict().values()]

    torch.testing.assert_close(train("tarry"), train("cpu"))


def test_a_compiled_function_is_handed_over_too() -> None:
    def train(device: str) -> list[Any]:
        torch.manual_seed(0)
        net = Net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = tarry.compile(step) if device == "tarry" else step
        losses = [run(torch.randn(ROWS, WIDTH).to(device)) for _ in range(14)]
        if device == "tarry":
            assert run.replays > 4  # type: ignore[attr-defined]
            assert _submitted() >= 2
        return [*(loss.cpu() for loss in losses), *(value.cpu() for value in net.state_dict().values())]

    torch.testing.assert_close(train("tarry"), train("cpu"))


# ---- errors


def _table() -> tuple[nn.Embedding, Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    table, net = nn.Embedding(8, WIDTH).to("tarry"), Net().to("tarry")
    return table, net, torch.optim.SGD([*table.parameters(), *net.parameters()], lr=0.1, momentum=0.9)


Look = Callable[[nn.Embedding, Net, Tensor], Any]


def _record_another(table: nn.Embedding, net: Net, loss: Tensor) -> None:
    _kept = net.layers[0](table(torch.arange(8).to("tarry")))
    tarry.mark_step()


@pytest.mark.parametrize(
    "look",
    [
        lambda table, net, loss: loss.item(),
        lambda table, net, loss: net.layers[0].weight.cpu(),
        lambda table, net, loss: loss + 1,
        lambda table, net, loss: tarry.wait(),
        _record_another,
    ],
    ids=["loss", "parameter", "operator", "wait", "next step"],
)
def test_an_error_is_raised_at_the_next_look_and_names_its_line(look: Look) -> None:
    table, net, optimizer = _table()
    good = torch.arange(8).repeat(ROWS // 8).to("tarry")

    def step(index: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(table(index)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(5):
        step(good)
    state = [value.clone().cpu() for value in net.state_dict().values()]
    for _ in range(2):
        C.forget_speculations()  # and that steps were waited for at once
        submitted = _submitted()
        bad = step(torch.full((ROWS,), 99).to("tarry"))
        assert _submitted() == submitted + 1
        with pytest.raises(IndexError, match=r"aten::embedding, recorded at .*test_overlap\.py:\d+"):
            look(table, net, bad)
        with pytest.raises(IndexError, match="embedding"):
            bad.cpu()  # what could not be computed stays that way
        for value, kept in zip(net.state_dict().values(), state, strict=True):
            assert torch.equal(value.cpu(), kept)
        del value
        _fresh = torch.ones(1, device="tarry") + 1
        tarry.mark_step()  # what was recorded before the error is no part of the next step
    assert step(good).item() > 0


def test_an_error_after_the_loss_that_was_read() -> None:
    net = Net().to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    counts = torch.zeros(8).to("tarry")
    x = torch.ones(ROWS, WIDTH).to("tarry")

    def step(index: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        counts.index_add_(0, index, loss.detach().expand(4))
        C.forget_speculations()
        optimizer.step()
        return loss.detach()

    for _ in range(5):
        assert step(torch.arange(4).to("tarry")).item() > 0
    before = [value.clone().cpu() for value in (counts, *net.parameters())]
    submitted = _submitted()
    bad = step(torch.full((4,), 99).to("tarry"))
    assert _submitted() == submitted + 1
    assert bad.item() > 0
    with pytest.raises(IndexError, match=r"aten::index_add_, recorded at .*test_overlap\.py:\d+"):
        tarry.wait()
    assert bad.item() > 0
    assert torch.equal(counts.cpu(), before[0])
    assert step(torch.arange(4).to("tarry")).item() > 0


def _broken() -> tuple[Tensor]:
    return (torch.ones(2).view(3),)


def test_a_program_that_fails_where_the_reference_path_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are there all the same, also for what was recorded of the next step already."""
    broken = C.script_program(torch.jit.script(_broken).graph, [], [], [])
    run = Program.run_native
    failing: list[bool] = []

    def run_native(self: Any, batch: Any, symbols: Any = ()) -> None:
        if failing and failing.pop():
            assert batch.run(broken, self._update, symbols, False, self._diagnose)
        else:
            run(self, batch, symbols)

    monkeypatch.setattr(Program, "run_native", run_native)
    monkeypatch.setattr(Program, "servable", False)  # not past run_native

    def train(fail_at: int) -> list[Tensor]:
        torch.manual_seed(0)
        net = Net(norm=False).to("tarry")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(8):
            x = torch.randn(ROWS, WIDTH).to("tarry")
            C.forget_speculations()  # and that steps were waited for at once
            failing[:] = [step == fail_at]
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if step == fail_at + 1:
                with pytest.raises(BackendError, match="nothing is lost"):
                    optimizer.step()
                tarry.mark_step()
            else:
                optimizer.step()
            losses.append(loss.detach())
        return [*(loss.cpu() for loss in losses), *(value.cpu() for value in net.state_dict().values())]

    torch.testing.assert_close(train(5), train(-2))


# ---- processes and threads


def _in_process(program: str) -> str:
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # else PyTorch's threads have the core that the worker needs
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=one_thread)
    assert done.returncode == 0, done.stderr
    return done.stderr


TRAINING = """
import torch, tarry
tarry.set_backend("torchscript")
table = torch.randn(64, 64, device="tarry", requires_grad=True)
w = [torch.randn(64, 64, device="tarry", requires_grad=True) for _ in range(30)]
optimizer = torch.optim.SGD([table, *w], lr=0.01, momentum=0.9)
def step(index):
    y = torch.nn.functional.embedding(index, table)
    for v in w:
        y = torch.tanh(y @ v)
    optimizer.zero_grad()
    y.square().mean().backward()
    optimizer.step()
for _ in range(5):
    step(torch.arange(64).to("tarry"))
"""


def test_a_process_ends_with_a_step_in_the_air() -> None:
    for _ in range(3):
        assert _in_process(TRAINING) == ""


def test_a_process_ends_with_a_step_that_has_failed() -> None:
    program = TRAINING + "tarry.wait()\nstep(torch.full((64,), 99).to('tarry'))  # the last line"
    assert "IndexError" in _in_process(program)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_with_a_step_in_the_air() -> None:
    net = Net(width=128).to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.randn(32, 128)), batch_size=8, num_workers=1, multiprocessing_context="fork")
    for _ in range(3):
        net(torch.randn(64, 128).to("tarry")).sum().backward()
        optimizer.step()
        assert sum(len(batch) for (batch,) in data) == 32
    assert torch.isfinite(net.layers[0].weight.cpu()).all()


def test_threads_that_train_at_once() -> None:
    def train(device: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        w = [torch.randn(8, 8, generator=generator).to(device).requires_grad_() for _ in range(20)]
        optimizer = torch.optim.SGD(w, lr=0.01, momentum=0.9)
        losses = []
        for step in range(12):
            y = w[0]
            for v in w[1:]:
                y = torch.tanh(y @ v)
            optimizer.zero_grad()
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            if step % 3 == 0:
                losses.append(loss.detach().cpu())
        return [*losses, *(v.detach().cpu() for v in w)]

    wanted = train("cpu")

    def work() -> None:
        torch.testing.assert_close(train("tarry"), wanted)

    on_threads(work)


def test_a_thread_that_reads_while_another_trains() -> None:
    net = Net().to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    before = [p.detach().cpu() for p in net.parameters()]
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                for p, kept in zip(net.parameters(), before, strict=True):
                    assert torch.equal(p.detach().cpu(), kept)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(40):
        optimizer.zero_grad()
        net(torch.randn(ROWS, WIDTH).to("tarry")).sum().backward()
        optimizer.step()
    stop.set()
    thread.join()
    assert not failures, failures
