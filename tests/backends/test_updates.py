"""Updates in place: in the very memory, in no other, done or not begun."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tarry
from tarry.backends.base import Capabilities, Computation
from tarry.errors import BackendError
from tarry.events import expect
from tarry.ir.graph import Graph
from tarry.native import C
from tests.backends.simple import Walking, using

USES_DEVICE = True


class InPlace(Walking):
    """Writes every output that may be into the buffer it replaces, after everything is computed."""

    name = "in place"
    capabilities = Capabilities(updates_in_place=True)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before_write: Callable[[], None] = lambda: None
        self.after_write: Callable[[], None] = lambda: None

    def chosen(self, graph: Graph) -> frozenset[int]:
        return frozenset(k for k, replaced in enumerate(graph.replaces) if replaced is not None)

    def compile(self, graph: Graph) -> Computation:
        super().compile(graph)
        in_place = self.chosen(graph)

        def run(inputs: list[torch.Tensor], numbers: list[Any]) -> list[Any]:
            self.runs += 1
            results: list[Any] = [result.clone() for result in self.walk(graph, inputs, numbers)]
            self.before_write()
            for k in in_place:
                replaced = graph.replaces[k]
                assert replaced is not None
                inputs[replaced].copy_(results[k])
                results[k] = "not looked at"
            self.after_write()
            return results

        return Computation(run, graph, in_place)


def _address(tensor: torch.Tensor) -> int:
    return C.materialise(tensor).data_ptr()


def _net(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(device)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, ids: list[int], device: str) -> None:
    loss = net(torch.tensor(ids).to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_parameters_and_their_state_stay_where_they_are() -> None:
    wanted, reference = _net("cpu")
    with using(InPlace()):
        net, optimizer = _net("tarry")
        _step(net, optimizer, [0, 1, 2], "tarry")
        tensors = [*net.parameters(), *(s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))]
        addresses = [_address(t) for t in tensors]
        for ids in ([1, 2, 3], [0, 0, 4]):
            _step(net, optimizer, ids, "tarry")
        assert [_address(t) for t in tensors] == addresses
        for ids in ([0, 1, 2], [1, 2, 3], [0, 0, 4]):
            _step(wanted, reference, ids, "cpu")
        for mine, other in zip(net.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(mine.detach().cpu(), other.detach())


def test_what_somebody_else_holds_does_not_change() -> None:
    with using(InPlace()):
        x = torch.ones(3).to("tarry") + 1
        snapshot = C.materialise(x)
        view = C.materialise(x)[1:]
        x.add_(1)
        tarry.mark_step()
        assert (snapshot.tolist(), view.tolist()) == ([2.0] * 3, [2.0] * 2)
        assert x.tolist() == [3.0] * 3
        del snapshot, view
        address = _address(x)
        x.add_(1)
        tarry.mark_step()
        assert _address(x) == address
        assert x.tolist() == [4.0] * 3


def test_copies_closures_and_detached_tensors_keep_what_they_saw() -> None:
    seen: list[list[float]] = []
    with using(InPlace()):
        x = torch.ones(3).to("tarry") + 1
        tarry.mark_step()
        copy = x.clone()
        tarry.add_step_closure(lambda t: seen.append(t.tolist()), x)
        host = x.cpu()
        x.mul_(5)
        tarry.mark_step(wait=True)
        assert seen == [[2.0] * 3]
        assert (copy.tolist(), host.tolist(), x.tolist()) == ([2.0] * 3, [2.0] * 3, [10.0] * 3)


def test_an_input_that_is_read_and_replaced() -> None:
    def program(device: str) -> list[torch.Tensor]:
        a, b = torch.arange(3.0).to(device), torch.ones(3).to(device)
        if device == "tarry":
            tarry.mark_step()
        old = a.clone()
        a.add_(b)
        b.mul_(old).add_(a)
        a, b = b, a
        a.sub_(b)
        return [a, b, old]

    expected = program("cpu")
    with using(InPlace()):
        for mine, wanted in zip(program("tarry"), expected, strict=True):
            assert mine.tolist() == wanted.tolist()


def test_a_failing_step_leaves_parameters_untouched() -> None:
    with using(InPlace()) as backend:
        net, optimizer = _net("tarry")
        for ids in ([0, 1, 2], [1, 2, 3]):
            _step(net, optimizer, ids, "tarry")
        before = {name: value.cpu() for name, value in net.state_dict().items()}
        moments = [state["exp_avg"].cpu() for state in optimizer.state.values()]
        addresses = [_address(p) for p in net.parameters()]
        written: list[None] = []
        backend.before_write = lambda: written.append(None)
        with pytest.raises(IndexError, match=r"index out of range[\s\S]*test_updates.py"):
            _step(net, optimizer, [0, 7, 1], "tarry")
        assert not written
        optimizer.zero_grad()
        for name, value in net.state_dict().items():
            assert torch.equal(value.cpu(), before[name]), name
        assert all(
            torch.equal(state["exp_avg"].cpu(), m) for state, m in zip(optimizer.state.values(), moments, strict=True)
        )
        assert [_address(p) for p in net.parameters()] == addresses


def test_updates_beside_what_may_fail_are_not_in_place() -> None:
    """The counter does not depend on the lookup: a compiler may write it before the lookup fails."""
    with using(InPlace()) as backend:
        counter, table = torch.zeros(2).to("tarry"), torch.ones(3, 2).to("tarry")
        tarry.mark_step()
        for ids in ([0], [2]):
            found = torch.nn.functional.embedding(torch.tensor(ids).to("tarry"), table)
            counter.add_(1)
            table.add_(found.sum())
            tarry.mark_step()
        graph = backend.graphs[-1]
        kept = {graph.inputs[k].type.sizes for k in graph.replaces if k is not None}
        assert kept == {(3, 2)}
        bad = torch.nn.functional.embedding(torch.tensor([9]).to("tarry"), table)
        counter.add_(1)
        table.add_(bad.sum())
        with pytest.raises(IndexError):
            tarry.mark_step()
        assert counter.tolist() == [2.0, 2.0]  # as if the program had stopped at the lookup
        assert table.tolist() == [[9.0, 9.0]] * 3


def test_claiming_an_output_that_replaces_nothing_is_an_error() -> None:
    class Bold(InPlace):
        def chosen(self, graph: Graph) -> frozenset[int]:
            return frozenset(range(len(graph.outputs)))

    with using(Bold()):
        x = torch.ones(3).to("tarry")
        y = x + 1
        with pytest.raises(BackendError, match=r"'in place': output 0 is among its in_place, but graph\.replaces"):
            y.cpu()


def test_a_backend_that_does_not_say_so_sees_no_updates() -> None:
    class Modest(InPlace):
        capabilities = Capabilities()

    with using(Modest()) as backend:
        x = torch.ones(3).to("tarry")
        tarry.mark_step()
        x.add_(1)
        assert x.tolist() == [2.0] * 3
    assert all(replaced is None for graph in backend.graphs for replaced in graph.replaces)


def test_a_graph_in_parts_updates_nothing_in_place_and_is_right() -> None:
    with using(InPlace(lacks=["aten::tanh"])):
        x = torch.ones(3).to("tarry")
        tarry.mark_step()
        for _ in range(2):
            x.add_(x.tanh())
            tarry.mark_step()
        wanted = torch.ones(3)
        for _ in range(2):
            wanted.add_(wanted.tanh())
        torch.testing.assert_close(x.cpu(), wanted)


@pytest.fixture
def handler() -> Iterator[list[str]]:
    """Interrupts are written down. A process that a shell started in the background ignores them; here they arrive."""
    seen: list[str] = []

    def note(signum: int, frame: Any) -> None:
        seen.append("interrupt")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    yield seen
    signal.signal(signal.SIGINT, before)


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # handlers run between bytecodes
        pass


@pytest.mark.parametrize("when", ["before_write", "after_write"])
def test_an_interrupt_waits_for_the_end_of_the_step(handler: list[str], when: str) -> None:
    with using(InPlace()) as backend:
        x = torch.ones(3).to("tarry")
        tarry.mark_step()
        order: list[str] = []

        def interrupt() -> None:
            _interrupt()
            order.extend(handler)

        setattr(backend, when, interrupt)
        x.add_(1)
        with pytest.raises(KeyboardInterrupt):
            tarry.mark_step()
        setattr(backend, when, lambda: None)
        assert order == []  # not while the step ran
        assert handler == ["interrupt"]
        with expect(syncs=0):
            assert x.tolist() == [2.0] * 3  # the step is done, once
        assert signal.getsignal(signal.SIGINT).__name__ == "note"


def test_an_interrupt_is_not_lost_if_the_step_fails(handler: list[str]) -> None:
    def fail() -> None:
        _interrupt()
        raise RuntimeError("and then this")

    with using(InPlace()) as backend:
        x = torch.ones(3).to("tarry")
        tarry.mark_step()
        x.add_(1)
        backend.before_write = fail
        with pytest.raises(KeyboardInterrupt):
            tarry.mark_step()
        assert handler == ["interrupt"]
        assert x.tolist() == [2.0] * 3


def test_an_interrupt_of_a_step_that_updates_nothing_leaves_it_pending(handler: list[str]) -> None:
    with using(InPlace()) as backend:
        x = torch.ones(3).to("tarry")
        tarry.mark_step()
        y = x + 1
        backend.before_write = _interrupt
        with pytest.raises(KeyboardInterrupt):
            tarry.mark_step()
        backend.before_write = lambda: None
        with expect(syncs=1):
            assert y.tolist() == [2.0] * 3


def test_an_interrupt_while_compiling_leaves_everything_pending(handler: list[str]) -> None:
    done = threading.Event()

    class Slow(Walking):
        def compile(self, graph: Graph) -> Any:
            if not self.graphs:
                self.graphs.append(graph)
                threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                done.wait()
            return super().compile(graph)

    with using(Slow()):
        x = torch.ones(3).to("tarry") + 1
        with pytest.raises(KeyboardInterrupt):
            tarry.mark_step()
        done.set()
        assert x.tolist() == [2.0] * 3
    assert handler == ["interrupt"]


def test_steps_on_other_threads_leave_signals_alone(handler: list[str]) -> None:
    with using(InPlace()):
        x = torch.ones(3).to("tarry")
        tarry.mark_step()
        x.add_(1)
        thread = threading.Thread(target=tarry.mark_step)
        thread.start()
        thread.join()
        assert x.tolist() == [2.0] * 3
    assert handler == []
