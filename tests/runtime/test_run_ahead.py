"""Running ahead: what is computed while a step is still being recorded is right, or is not used."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import tarry
from tarry.native import C
from tests.support.threads import on_threads

USES_DEVICE = True


@pytest.fixture(autouse=True)
def _torchscript() -> Iterator[None]:
    tarry.set_backend("torchscript")
    C.reset_counters(0)
    yield
    tarry.config.run_ahead = True
    tarry.set_backend("eager")


def _launches() -> tuple[int, int]:
    counts = C.counters(0)
    return counts.get("run_ahead", 0), counts.get("run_ahead_miss", 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.norm(x)
        return out


Between = Callable[[int, Net, Tensor], None]


def _nothing(step: int, net: Net, x: Tensor) -> None: ...


def _train(
    device: str,
    steps: int = 10,
    before: Between = _nothing,
    between: Between = _nothing,
    after: Between = _nothing,
    scale: Callable[[int], float] = lambda step: 1.0,
) -> list[Tensor]:
    """Losses, then the state. Functions are called at the start, before the backward pass, and before the update."""
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x = torch.randn(16, 8).to(device)
    losses = []
    for step in range(steps):
        before(step, net, x)
        loss = net(x).square().mean() * scale(step)
        between(step, net, x)
        optimizer.zero_grad()
        loss.backward()
        after(step, net, x)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach().cpu())
    return [*losses, *(value.cpu() for value in net.state_dict().values())]


def _assert_as_eager(**program: object) -> None:
    wanted = _train("cpu", **program)  # type: ignore[arg-type]
    C.reset_counters(0)
    mine = _train("tarry", **program)  # type: ignore[arg-type]
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b)
    tarry.config.run_ahead = False
    for a, b in zip(_train("tarry", **program), mine, strict=True):  # type: ignore[arg-type]
        assert torch.equal(a, b)


def test_a_training_loop_runs_ahead() -> None:
    _assert_as_eager()
    used, missed = _launches()
    assert used >= 6
    assert missed <= 1  # the first step, which makes the optimizer's state, does not come again


def test_it_can_be_turned_off() -> None:
    tarry.config.run_ahead = False
    _train("tarry")
    assert _launches() == (0, 0)


def test_a_number_that_changes_now_and_then_is_noticed() -> None:
    _assert_as_eager(scale=lambda step: 3.0 if step in (4, 5) else 1.0)
    used, missed = _launches()
    assert used >= 1
    assert missed >= 1


def test_new_data_in_place_each_step() -> None:
    def rotate(step: int, net: Net, x: Tensor) -> None:
        x.copy_(x.roll(1, 0))

    _assert_as_eager(before=rotate)


def test_a_weight_that_is_written_after_the_launch() -> None:
    def scale(step: int, net: Net, x: Tensor) -> None:
        with torch.no_grad():
            net.layers[0].weight.mul_(0.9)

    _assert_as_eager(after=scale)


def test_an_input_that_is_written_between_forward_and_backward() -> None:
    def write(step: int, net: Net, x: Tensor) -> None:
        net.layers[0].weight.data.mul_(0.9)

    _assert_as_eager(between=write)


def test_a_value_that_is_read_in_mid_step() -> None:
    def read(step: int, net: Net, x: Tensor) -> None:
        if step % 3 == 2:
            assert net.layers[0].weight.sum().item() != 0

    _assert_as_eager(between=read)


def test_other_graphs_in_between() -> None:
    def evaluate(step: int, net: Net, x: Tensor) -> None:
        if step % 2:
            net.eval()
            with torch.no_grad():
                net(x).sum().item()
            net.train()

    _assert_as_eager(before=evaluate)


def test_it_is_given_up_after_some_misses() -> None:
    scales = [1.0 + 0.01 * step for step in range(40)]
    _assert_as_eager(steps=40, scale=lambda step: scales[step])
    assert _launches()[1] <= 8


def test_a_fault_of_the_early_part_names_the_line_and_harms_nothing() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(8, 8).to("tarry")
    net = Net().to("tarry")
    optimizer = torch.optim.SGD([*table.parameters(), *net.parameters()], lr=0.1, momentum=0.9)
    good = torch.arange(8).to("tarry")

    def step(index: Tensor) -> float:
        optimizer.zero_grad()
        loss = net(table(index)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(5):
        step(good)
    before = [p.detach().clone().cpu() for p in net.parameters()]
    with pytest.raises(IndexError, match="test_run_ahead"):
        step(torch.full((8,), 99).to("tarry"))
    for p, kept in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.detach().cpu(), kept)
    del p
    assert step(good) > 0


def test_threads_that_train_at_once() -> None:
    def work() -> None:
        net = [value.cpu() for value in _alone()]
        for a, b in zip(net, alone, strict=True):
            torch.testing.assert_close(a, b)

    def _alone() -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        w = [torch.randn(8, 8, generator=generator).to("tarry").requires_grad_() for _ in range(20)]
        optimizer = torch.optim.SGD(w, lr=0.01)
        for _ in range(8):
            y = w[0]
            for v in w[1:]:
                y = torch.tanh(y @ v)
            optimizer.zero_grad()
            y.square().mean().backward()
            optimizer.step()
        return [v.detach() for v in w]

    alone = [value.cpu() for value in _alone()]
    on_threads(work)


def test_a_graph_without_inputs() -> None:
    x, y = torch.zeros(3, device="tarry"), torch.zeros(3)
    for _ in range(40):
        x, y = x.sin().cos(), y.sin().cos()
    torch.testing.assert_close(x.cpu(), y)


def test_denormal_numbers_are_flushed_on_the_second_thread_too() -> None:
    def train() -> list[Tensor]:
        w = [torch.full((4,), 2e-38).to("tarry").requires_grad_() for _ in range(20)]
        optimizer = torch.optim.SGD(w, lr=0.0, momentum=0.9)
        read = []
        for _ in range(5):
            optimizer.zero_grad()
            tiny = [(v * 0.01) * 1e30 for v in w]
            torch.stack(tiny).sum().backward()
            optimizer.step()
            read.append(tiny[0].detach().cpu())
        return read

    train()  # the second thread exists from here on
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        assert all((value == 0).all() for value in train())
    finally:
        torch.set_flush_denormal(False)


def test_a_process_ends_while_an_early_part_runs() -> None:
    program = """
import torch, tarry
tarry.set_backend("torchscript")
w = [torch.randn(64, 64, device="tarry", requires_grad=True) for _ in range(30)]
optimizer = torch.optim.SGD(w, lr=0.01, momentum=0.9)
for _ in range(5):
    y = w[0]
    for v in w[1:]:
        y = torch.tanh(y @ v)
    optimizer.zero_grad()
    y.square().mean().backward()
    optimizer.step()
y = w[0]
for v in w[1:]:
    y = torch.tanh(y @ v)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


# ---- where the second thread would compete


@pytest.mark.parametrize(
    ("threads", "cores", "device", "free"),
    [
        (1, 2, "cpu", True),
        (2, 2, "cpu", False),
        (7, 8, "cpu", False),
        (6, 8, "cpu", True),
        (1, 1, "cpu", True),
        (8, 8, "cuda:0", True),
    ],
)
def test_the_second_thread_is_used_where_it_has_a_core(threads: int, cores: int, device: str, free: bool) -> None:
    assert C.may_use_second_thread(threads, cores, device) is free


def test_a_step_with_a_thread_for_each_core_does_not_run_ahead() -> None:
    _train("tarry")
    assert _launches()[0] > 0
    tarry.metrics.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(max(2, len(os.sched_getaffinity(0))))
    try:
        mine, wanted = _train("tarry"), _train("cpu")
    finally:
        torch.set_num_threads(threads)
    counts = C.counters(0)
    assert counts["run_ahead_off"] > 4
    assert counts.get("run_ahead", 0) + counts.get("handed_over", 0) <= 1  # what was launched before the number changed
    assert "run_ahead_off" in tarry.metrics.report()
    torch.testing.assert_close(mine, wanted)


# ---- inputs that are predicted before they are recorded


def _train_on_batches(
    device: str, swapped: frozenset[int] = frozenset(), moved: frozenset[int] = frozenset()
) -> list[Tensor]:
    """A batch is new in each step. In `swapped` steps its parts come in the other order, and in `moved` ones a weight
    is another tensor."""
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(14):
        x, y = torch.randn(16, 8), torch.randn(16, 8)
        if step in swapped:
            y = y.to(device)
            x = x.to(device)
        else:
            x, y = x.to(device), y.to(device)
        if step in moved:
            net.layers[3].weight.data = net.layers[3].weight.data.clone() * 0.5
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return [*losses, *(value.cpu() for value in net.state_dict().values())]


def test_batches_are_foreseen_by_the_order_of_their_uploads() -> None:
    C.reset_counters(0)
    mine = _train_on_batches("tarry")
    used, missed = _launches()
    assert used >= 8
    assert missed <= 1
    torch.testing.assert_close(mine, _train_on_batches("cpu"))


@pytest.mark.parametrize(
    ("swapped", "moved"), [({6, 9}, ()), ((), {5, 9}), ({6, 7, 8, 9}, {10})], ids=["swapped", "moved", "both"]
)
def test_a_wrong_guess_costs_time_and_nothing_else(swapped: set[int], moved: set[int]) -> None:
    program = (frozenset(swapped), frozenset(moved))
    torch.testing.assert_close(_train_on_batches("tarry", *program), _train_on_batches("cpu", *program))


def test_memory_of_a_batch_is_not_kept_for_its_like() -> None:
    """What is remembered of a storage, to foresee the next, does not keep its contents alive."""
    net = Net().to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    held = []
    for _ in range(4):
        x = torch.randn(16, 8).to("tarry")
        held.append(weakref.ref(C.materialise(x)))
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del x
    assert sum(ref() is not None for ref in held) <= 1


def test_steps_of_two_kinds_let_go_of_each_others_results() -> None:
    """What is remembered of a step's results may be the last to hold their storages, and goes with the next step."""
    torch.manual_seed(0)
    net = Net().to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(8):
        x = torch.full((4 + step % 2, 8), 0.5).add(torch.arange(4 + step % 2)[:, None]).to("tarry")
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(0 < loss < 2 for loss in losses)
