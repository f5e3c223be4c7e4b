"""What forces a value, and what it forces: everything pending, once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tarry
from tarry.events import expect, record
from tarry.ir import Graph, evaluate
from tests.runtime.portable import using

USES_DEVICE = True


def test_nothing_runs_until_a_value_is_needed() -> None:
    with expect(syncs=0, executes=0):
        x = torch.ones(3, device="tarry")
        y = (x + 1).sum() * 2
    with expect(syncs=1, executes=1):
        assert y.item() == 12.0


def test_ten_reads_run_one_program() -> None:
    x = torch.arange(10.0, device="tarry")
    values = [x[i] * 2 for i in range(10)]
    with expect(syncs=1):
        assert [v.item() for v in values] == [2.0 * i for i in range(10)]


def test_reading_again_runs_nothing() -> None:
    x = torch.ones(3, device="tarry") + 1
    x.cpu()
    with expect(syncs=0):
        assert x.cpu().tolist() == x.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        lambda t: t.cpu(),
        lambda t: t.tolist(),
        lambda t: bool(t),
        lambda t: float(t),
        lambda t: str(t),
        lambda t: torch.empty(()).copy_(t),
        lambda t: tarry.sync(t),
        lambda t: tarry.mark_step(),
        lambda t: torch.tarry.synchronize(),
    ],
    ids=["item", "cpu", "tolist", "bool", "float", "print", "copy_", "sync", "mark_step", "synchronize"],
)
def test_what_forces_a_value(read) -> None:
    x = torch.ones((), device="tarry") + 1
    with expect(syncs=1):
        read(x)


def test_sync_takes_tensors_only() -> None:
    with pytest.raises(TypeError, match="takes tensors"):
        tarry.sync(3)  # type: ignore[arg-type]


def test_a_step_is_cut_after_the_optimizer() -> None:
    net = nn.Linear(3, 1).to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.ones(2, 3, device="tarry")
    with expect(syncs=3), record() as seen:
        for _ in range(3):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
    assert {event.fields["reason"] for event in seen if event.kind == "sync"} == {"optimizer.step"}
    with tarry.config.override(cut_after_optimizer=False), expect(syncs=0):
        net(x).sum().backward()
        optimizer.step()


def test_the_node_cap_bounds_what_is_pending() -> None:
    x = torch.ones(2, device="tarry")
    with tarry.config.override(max_pending_nodes=50), record() as seen:
        for _ in range(200):
            x = x + 1
    assert any(event.kind == "sync" and event.fields["reason"] == "node cap" for event in seen)
    assert x.tolist() == [201.0, 201.0]


def test_a_training_loop_compiles_twice_then_hits_the_cache() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to("tarry")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step() -> float:
        x = torch.randn(5, 4).to("tarry")
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    with expect(compiles=2):  # the first step makes the optimizer's state, the others read it
        for _ in range(10):
            step()
    with expect(compiles=0, cache_hits=5, fallbacks=0):
        for _ in range(5):
            step()


def test_numbers_do_not_recompile() -> None:
    x = torch.ones(3, device="tarry")
    tarry.mark_step()
    (x * 0.5 + 1).cpu()
    with expect(compiles=0, cache_hits=3):
        results = [(x * factor + 1).tolist() for factor in (0.25, 3.0, -1.0)]
    assert results == [[1.25] * 3, [4.0] * 3, [0.0] * 3]


def test_kinds_of_numbers_do_recompile() -> None:
    x = torch.ones(3, dtype=torch.int64, device="tarry")
    assert (x * 2).dtype == torch.int64
    tarry.mark_step()
    assert (x * 2.0).tolist() == [2.0] * 3


def test_a_tensor_kept_by_a_logger_gives_its_own_program_and_right_values() -> None:
    kept = []

    def step(keep: bool) -> float:
        y = torch.ones(3, device="tarry") * 2
        if keep:
            kept.append(y)
        z = (y + 1).sum()
        del y
        return z.item()

    step(False)
    with expect(compiles=1):
        step(True)
    with expect(compiles=0):
        step(False)
        step(True)
    assert [k.tolist() for k in kept] == [[2.0] * 3] * 2


def test_the_order_of_creation_of_storages_does_not_matter() -> None:
    def program(first: bool) -> None:
        a, b = (torch.empty(2, device="tarry") for _ in range(2))
        if not first:
            a, b = b, a
        a.fill_(1)
        b.fill_(2)
        torch.stack([a, b]).cpu()

    program(True)
    with expect(compiles=0):
        program(False)


def test_aliasing_of_inputs_is_part_of_a_program() -> None:
    x, y = torch.ones(2, device="tarry"), torch.full((2,), 5.0, device="tarry")
    tarry.mark_step()
    assert (x + x).tolist() == [2.0, 2.0]
    assert (x + y).tolist() == [6.0, 6.0]
    assert (y + x).tolist() == [6.0, 6.0]


def test_mark_step_with_nothing_pending_does_nothing() -> None:
    tarry.mark_step()
    with expect(syncs=0, executes=0):
        tarry.mark_step(wait=True)
        tarry.wait()


def test_several_threads_sync_and_record_at_once() -> None:
    results: dict[int, list[float]] = {}

    def work(k: int) -> None:
        x = torch.full((4,), float(k), device="tarry")
        for i in range(50):
            x = x + 1
            if i % 7 == 0:
                x.sum().item()
        results[k] = x.tolist()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [k + 50.0] * 4 for k in range(4)}


def test_a_finaliser_that_reads_a_value_does_not_run_in_a_compile() -> None:
    class Cycle:
        seen: list[float] = []
        errors: list[Exception] = []

        def __init__(self) -> None:
            self.tensor, self.me = torch.ones(3, device="tarry"), self

        def __del__(self) -> None:
            try:
                self.seen.append((self.tensor * 2).sum().item())
            except Exception as error:
                self.errors.append(error)

    class Littering(tarry.Backend):
        name = "littering"

        def compile(self, graph: Graph) -> Callable[..., list[torch.Tensor]]:
            litter = [[[], {}] for _ in range(20_000)]  # enough for the collector to run
            del litter
            return lambda inputs, numbers: list(evaluate(graph, inputs, numbers))

    with using(Littering()):
        for _ in range(20):
            Cycle()
        assert (torch.ones(3, device="tarry") + 1).tolist() == [2.0] * 3
        gc.collect()
    assert (Cycle.errors, Cycle.seen) == ([], [6.0] * 20)
