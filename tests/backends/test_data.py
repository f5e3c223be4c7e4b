"""Data that only the backend can read: they stay with it from step to step, and come out wherever a value is wanted."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tarry
from tarry.backends.base import Computation
from tarry.backends.lowering import post_order
from tarry.errors import BackendError
from tarry.events import Event, record
from tarry.ir.evaluate import run_node
from tarry.ir.graph import Graph
from tests.backends.simple import Walking, using
from tests.backends.simulated import Accelerator, Asynchronous, Handle, Updating

USES_DEVICE = True


def _transfers(seen: list[Event]) -> int:
    return sum(event.kind == "transfer" for event in seen)


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 1))


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, k: int, device: str) -> torch.Tensor:
    x = (torch.linspace(-1, 1, 12).view(4, 3) * (k + 1)).to(device)
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _trained(device: str, steps: int = 6, between: Callable[[int], None] = lambda k: None) -> list[torch.Tensor]:
    net = _net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses = []
    for k in range(steps):
        losses.append(_step(net, optimizer, k, device))
        between(k)
    return [*(loss.cpu() for loss in losses), *(value.cpu() for value in net.state_dict().values())]


def _close(mine: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [Accelerator, Updating, Asynchronous])
def test_training(kind: type[Accelerator]) -> None:
    expected = _trained("cpu")
    with using(kind()) as backend:
        _close(_trained("tarry"), expected)
        assert backend.runs >= 6


@pytest.mark.parametrize("kind", [Accelerator, Updating, Asynchronous])
def test_parameters_are_transferred_once(kind: type[Accelerator]) -> None:
    with using(kind()) as backend:
        net = _net().to("tarry")
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        for k in range(2):
            _step(net, optimizer, k, "tarry")
        tarry.mark_step()
        for k in range(3):
            read = backend.read
            with record() as seen:
                _step(net, optimizer, k, "tarry")
            assert _transfers(seen) == 1, "the batch alone"
            assert backend.read == read, "nothing was read"
        with torch.no_grad(), record() as seen:
            x = torch.ones(2, 3).to("tarry")
            for _ in range(3):
                net.eval()(x).cpu()
        assert _transfers(seen) == 1  # x, once


def test_memory_is_freed_with_the_tensors() -> None:
    with using(Accelerator()) as backend:
        x = torch.ones(100).to("tarry")
        for _ in range(50):
            x = x * 1.5 + 1
            x.cpu()
        gc.collect()
        assert len(backend.memory) <= 3
        del x
        gc.collect()
        assert not backend.memory


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[1, 2].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.cpu().numpy().tolist(),
    "print": lambda x: str(x).replace(", device='tarry:0'", ""),
    "print a view": lambda x: repr(x.t()[1:]).replace(", device='tarry:0'", ""),
    "bool": lambda x: bool((x > -100).all()),
    "copy to the host": lambda x: torch.empty(3, 4).copy_(x).tolist(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)).tolist(),
    "save": lambda x: _saved(x).tolist(),
    "deepcopy": lambda x: copy.deepcopy(x).tolist(),
    "clone": lambda x: x.clone().tolist(),
    "nonzero": lambda x: x.nonzero().tolist(),
    "masked select": lambda x: x[x > 3].tolist(),
    "unique": lambda x: (x % 3).unique().tolist(),
    "strided view": lambda x: x.t()[::2, 1:].tolist(),
    "view as another dtype": lambda x: x.view(torch.int32)[0].tolist(),
    "iterate": lambda x: [row.sum().item() for row in x],
    "allclose": lambda x: torch.allclose(x, x + 0),
    "storage": lambda x: len(x.untyped_storage()),
}


def _saved(x: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("kind", [Accelerator, Asynchronous])
def test_values_can_be_read(read: Callable[[torch.Tensor], Any], kind: type[Accelerator]) -> None:
    host = torch.arange(12.0).view(3, 4)
    with using(kind()):
        x = host.to("tarry") + 1
        tarry.mark_step()
        assert read(x) == read(host + 1)
        assert x.tolist() == (host + 1).tolist()


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "an element": lambda x: x.__setitem__((0, 0), 7.0),
    "a mask": lambda x: x.__setitem__(x > 5, -1.0),
    "an index": lambda x: x.index_put_((torch.tensor([0, 2], device=x.device),), torch.tensor(3.0, device=x.device)),
    "copy from the host": lambda x: x[1].copy_(torch.arange(4.0)),
    "add": lambda x: x.add_(1),
    "through a view": lambda x: x.t()[1].mul_(2),
    "data": lambda x: setattr(x, "data", x.data * 3),
    "fill": lambda x: x.detach().fill_(2),
    "out": lambda x: torch.add(x, 1, out=x),
    "resize": lambda x: x.resize_(2, 3),
    "set": lambda x: x.set_(torch.ones(5, device=x.device)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("forced", [False, True], ids=["recorded", "eager"])
@pytest.mark.parametrize("computed", [False, True], ids=["uploaded", "computed"])
@pytest.mark.parametrize("kind", [Accelerator, Updating])
def test_values_can_be_written(
    write: Callable[[torch.Tensor], Any], forced: bool, computed: bool, kind: type[Accelerator]
) -> None:
    eager = (
        "aten::fill_.Scalar aten::index_put_ aten::_index_put_impl_ aten::copy_ aten::add_.Tensor aten::mul_.Tensor "
        "aten::masked_fill_.Scalar aten::add.out"
    )
    host = torch.arange(12.0).view(3, 4).clone()
    wanted = host * 2 if computed else host.clone()
    write(wanted)
    with using(kind()), tarry.config.override(force_fallback=set(eager.split()) if forced else set()):
        x = host.to("tarry")
        if computed:
            x = x * 2
        other, before = x.clone(), x.tolist()
        (x + 1).cpu()  # the backend has data for x now
        write(x)
        assert x.tolist() == wanted.tolist()
        assert (x + 1).tolist() == (wanted + 1).tolist()
        write(x)
        write(wanted)
        assert (x * 1).tolist() == wanted.tolist()
        assert other.tolist() == before


def test_a_fallback_in_the_middle_of_training() -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(6, 3).to(device).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        for _ in range(4):
            hits = (weight.detach().sum(1) > 0).nonzero().flatten()
            loss = weight[hits].square().sum() + weight.abs().sum()
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                weight.grad.view(-1)[0] = 1.0
            optimizer.step()
        return [weight.detach().cpu()]

    expected = train("cpu")
    for kind in (Accelerator, Updating, Asynchronous):
        with using(kind()):
            _close(train("tarry"), expected)


def test_operators_it_does_not_know_get_tensors_and_give_data() -> None:
    expected = _trained("cpu")
    for lacks in (["aten::native_batch_norm_backward", "aten::gelu"], ["aten::mm", "aten::permute"], ["aten::addmm"]):
        with using(Accelerator(lacks=lacks)):
            _close(_trained("tarry"), expected)


# ---- changing the backend


class Elsewhere(Walking):
    """Tensors as they are."""


@pytest.mark.parametrize("kind", [Accelerator, Updating, Asynchronous])
@pytest.mark.parametrize(
    "other", [lambda: "eager", Walking, Accelerator, Updating], ids=["eager", "walking", "opaque", "updating"]
)
def test_switching_in_the_middle_loses_nothing(kind: type[Accelerator], other: Callable[[], Any]) -> None:
    expected = _trained("cpu")
    first = kind()
    with using(first):

        def between(k: int) -> None:
            if k in (1, 3):
                tarry.set_backend(other())
            elif k in (2, 4):
                tarry.set_backend(first)

        _close(_trained("tarry", between=between), expected)
    assert first.life.count("setup") == first.life.count("teardown")


def test_pending_computed_and_viewed_tensors_survive_the_backend() -> None:
    backend = Accelerator()
    with using(backend):
        x = torch.arange(6.0).to("tarry")
        computed = x * 2
        tarry.mark_step()
        view = computed.view(2, 3)[1]
        pending = computed + view.sum()
    assert backend.life == ["setup", "teardown"]
    assert not backend.memory
    read = backend.read
    assert computed.tolist() == [0, 2, 4, 6, 8, 10]
    assert view.tolist() == [6, 8, 10]
    assert pending.tolist() == [24, 26, 28, 30, 32, 34]
    view.zero_()
    assert computed.tolist() == [0, 2, 4, 0, 0, 0]
    assert backend.read == read


def test_a_parameter_of_another_backend_is_transferred_once() -> None:
    with using(Accelerator()):
        x = torch.ones(3).to("tarry") * 2
        tarry.mark_step()
        tarry.set_backend(Accelerator())
        with record() as seen:
            for _ in range(4):
                assert (x + 1).tolist() == [3.0] * 3
        assert _transfers(seen) == 1


def test_a_tensor_from_the_host_is_read_from_the_host_again() -> None:
    with using(Accelerator()) as backend:
        x = torch.ones(3).to("tarry")
        (x + 1).cpu()
        read = backend.read
        for other in (Accelerator(), Walking(), Updating(), backend):
            tarry.set_backend(other)
            assert (x + 1).tolist() == [2.0] * 3
        assert backend.read <= read + 1  # the last result


def test_data_that_cannot_be_read_are_an_error_at_the_read_and_nowhere_else() -> None:
    class Flaky(Accelerator):
        broken: Handle | None = None

        def to_tensor(self, data: Handle) -> torch.Tensor:
            if data is self.broken:
                raise RuntimeError("bit rot")
            return super().to_tensor(data)

    with using(Flaky()) as backend:
        x, y = torch.ones(3).to("tarry") * 2, torch.ones(3).to("tarry") * 3
        tarry.mark_step()
        backend.broken = next(
            h
            for h in gc.get_objects()
            if isinstance(h, Handle)
            and backend.memory.get(h.address) is not None
            and backend.memory[h.address].tolist() == [2.0] * 3
        )
    with pytest.raises(RuntimeError, match="bit rot"):
        x.cpu()
    assert y.tolist() == [3.0] * 3


# ---- results that are not as they should be


class Sloppy(Accelerator):
    """Gives right values in memory that is laid out as it likes."""

    def to_tensor(self, data: Handle) -> torch.Tensor:
        content = super().to_tensor(data)
        if content.dim() == 2:
            return content.t().contiguous().t()
        if content.is_complex():
            return content.conj().resolve_conj().conj()
        spaced = torch.full((2 * content.numel() + 1,), -1, dtype=content.dtype)[1::2].view(content.shape)
        return spaced.copy_(content)


def test_tensors_of_any_strides_will_do() -> None:
    with using(Sloppy()):
        x = torch.arange(12.0).view(3, 4).to("tarry") + 1
        row = torch.arange(4.0).to("tarry") * 2
        z = torch.tensor([1 + 2j, 3 - 1j]).to("tarry") * 1j
        tarry.mark_step()
        assert x[1].tolist() == [5.0, 6.0, 7.0, 8.0]
        assert x.t()[0].tolist() == [1.0, 5.0, 9.0]
        assert x.nonzero().shape == (12, 2)
        x[0, 1] = 100
        assert x.tolist() == [[1, 100, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
        assert row[2:].tolist() == [4.0, 6.0]
        assert z.tolist() == [-2 + 1j, 1 + 3j]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda t: t.double(), r"to_tensor\(data\) gave f64\[3\] instead of f32\[3\]"),
        (lambda t: t[:2], r"to_tensor\(data\) gave f32\[2\] instead of f32\[3\]"),
        (lambda t: t.numpy(), r"to_tensor\(data\) gave a ndarray, not a tensor"),
    ],
    ids=["dtype", "shape", "array"],
)
def test_to_tensor_is_checked(wrong: Callable[[torch.Tensor], Any], message: str) -> None:
    class Wrong(Accelerator):
        good = False

        def to_tensor(self, data: Handle) -> Any:
            tensor = super().to_tensor(data)
            return tensor if self.good else wrong(tensor)

    with using(Wrong()) as backend:
        x = torch.ones(3).to("tarry") + 1
        tarry.mark_step()
        with pytest.raises(BackendError, match=f"'accelerator': {message}"):
            x.cpu()
        backend.good = True
        assert x.tolist() == [2.0] * 3


def test_a_result_that_is_missing() -> None:
    class Forgetful(Accelerator):
        def compile(self, graph: Graph) -> Any:
            return lambda inputs, numbers: [None] * len(graph.outputs)

    with using(Forgetful()):
        x = torch.ones(3).to("tarry") + 1
        with pytest.raises(BackendError, match=r"'accelerator'[\s\S]*result 0 is None"):
            x.cpu()
        assert x.tolist() == [2.0] * 3


class Lazy(Updating):
    """Knows that a copy of data need be no copy."""

    name = "lazy"

    def compile(self, graph: Graph) -> Any:
        made = super().compile(graph)
        copies = {node.results[0]: node.operands[0] for node in graph.nodes if node.op == "aten::clone"}
        position = {value: k for k, value in enumerate(graph.inputs)}

        def run(inputs: list[Handle], numbers: list[Any]) -> list[Any]:
            outputs = made.run(inputs, numbers)
            first: dict[Any, Any] = {}
            for k, value in enumerate(graph.outputs):
                source = copies.get(value)
                if k not in made.in_place and source in position:
                    outputs[k] = inputs[position[source]]
                elif k not in made.in_place and source is not None:
                    outputs[k] = first.setdefault(source, outputs[k])
            return outputs

        return type(made)(run, graph, made.in_place)


def test_data_that_two_tensors_share_are_not_overwritten() -> None:
    with using(Lazy()) as backend:
        x = torch.ones(3).to("tarry") * 1
        tarry.mark_step()
        y = x.clone()
        tarry.mark_step()
        assert len(backend.memory) == 1
        x.add_(1)
        tarry.mark_step()
        assert (x.tolist(), y.tolist()) == ([2.0] * 3, [1.0] * 3)
        y.add_(5)
        x.add_(1)
        tarry.mark_step()
        assert (x.tolist(), y.tolist()) == ([3.0] * 3, [6.0] * 3)
        z = x * 2
        w, v = z.clone(), z.clone()
        tarry.mark_step()
        w.add_(1)
        tarry.mark_step()
        assert (z.tolist(), w.tolist(), v.tolist()) == ([6.0] * 3, [7.0] * 3, [6.0] * 3)


class Prompt(Updating):
    """Computes updates first, and overwrites an input as soon as the graph reads it no more."""

    name = "prompt"
    during: Callable[[], None] | None = None

    def compile(self, graph: Graph) -> Any:
        super().compile(graph)
        replaced = {graph.outputs[k]: i for k, i in enumerate(graph.replaces) if i is not None}
        first = post_order(graph, list(replaced))
        nodes = [*first, *(node for node in graph.nodes if node not in first)]
        last_read = {value: k for k, node in enumerate(nodes) for value in node.operands}

        def run(inputs: list[Handle], numbers: list[Any]) -> list[Handle | None]:
            environment = {v: self.memory[h.address] for v, h in zip(graph.inputs, inputs, strict=True)}
            for k, node in enumerate(nodes):
                run_node(node, environment, numbers, torch.device("cpu"))
                for value, position in replaced.items():
                    if value in environment and last_read.get(graph.inputs[position], -1) <= k:
                        self.memory[inputs[position].address].copy_(environment[value])
            if self.during is not None:
                self.during()
            return [None if v in replaced else self.store(environment[v].clone()) for v in graph.outputs]

        return Computation(run, graph, frozenset(k for k, i in enumerate(graph.replaces) if i is not None))


def test_what_another_thread_has_recorded_meanwhile_reads_what_it_saw() -> None:
    """It holds on to the result of the step that was in flight, which the next step overwrites."""
    with using(Prompt()) as backend:
        x = torch.ones(3).to("tarry") * 1
        tarry.mark_step()
        seen: list[torch.Tensor] = []

        def meanwhile() -> None:
            thread = threading.Thread(target=lambda: seen.append(x * 100))
            thread.start()
            thread.join()

        x.mul_(2)
        backend.during = meanwhile
        tarry.mark_step()
        backend.during = None
        x.add_(1)
        tarry.mark_step()
        assert x.tolist() == [3.0] * 3
        assert seen[0].tolist() == [200.0] * 3


def test_updates_happen_in_the_same_memory() -> None:
    with using(Updating()) as backend:
        x = torch.ones(3).to("tarry") * 1
        tarry.mark_step()
        addresses = set(backend.memory)
        for _ in range(3):
            x.mul_(2)
            tarry.mark_step()
            assert set(backend.memory) == addresses
        uploaded = torch.ones(2).to("tarry")
        (uploaded + 1).cpu()
        addresses = set(backend.memory)
        uploaded.mul_(3)
        tarry.mark_step()
        assert set(backend.memory) == addresses
        assert uploaded.tolist() == [3.0, 3.0]
        assert x.tolist() == [8.0] * 3


def test_an_update_that_fails_leaves_the_data() -> None:
    def program(device: str) -> tuple[nn.Embedding, torch.optim.Optimizer, Callable[[list[int]], None]]:
        torch.manual_seed(0)
        net = nn.Embedding(4, 3).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

        def step(ids: list[int]) -> None:
            loss = net(torch.tensor(ids).to(device)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return net, optimizer, step

    with using(Updating()):
        net, optimizer, step = program("tarry")
        wanted, _, reference = program("cpu")
        for ids in ([0, 1], [1, 2]):
            step(ids)
            reference(ids)
        with pytest.raises(IndexError, match="index out of range"):
            step([0, 9])
        optimizer.zero_grad()
        torch.testing.assert_close(net.weight.detach().cpu(), wanted.weight.detach())
        step([3, 3])
        reference([3, 3])
        torch.testing.assert_close(net.weight.detach().cpu(), wanted.weight.detach())


# ---- asynchronous


def test_a_step_returns_before_it_is_done_and_reads_wait() -> None:
    with using(Asynchronous()) as backend:
        x = torch.ones(3).to("tarry")
        backend.go.clear()
        y = (x * 2).sum()
        tarry.mark_step()  # returns
        z = y + 1
        tarry.mark_step()  # on what is not there yet
        assert backend.runs == 2
        threading.Timer(0.1, backend.go.set).start()
        assert z.item() == 7.0
        assert y.item() == 6.0


@pytest.mark.parametrize(
    "wait",
    [
        lambda: tarry.wait(),
        lambda: torch.tarry.synchronize(),
        lambda: tarry.mark_step(wait=True),
        lambda: torch.accelerator.synchronize(),
    ],
    ids=["wait", "synchronize", "mark_step", "accelerator"],
)
def test_waiting_waits_for_what_is_in_flight(wait: Callable[[], None]) -> None:
    with using(Asynchronous()) as backend:
        backend.go.clear()
        x = torch.ones(3).to("tarry") * 2
        tarry.mark_step()
        assert len(backend.memory) == 1  # the input; no result is there
        threading.Timer(0.1, backend.go.set).start()
        wait()
        assert backend.waited >= 1
        assert any(content.tolist() == [2.0] * 3 for content in backend.memory.values())
        del x


def test_an_error_in_flight_is_raised_at_the_read() -> None:
    table = torch.ones(3, 2)
    with using(Asynchronous()):
        good = table.to("tarry") + 1
        bad = F.embedding(torch.tensor([5]).to("tarry"), table.to("tarry"))
        tarry.mark_step()
        later = bad * 2
        tarry.mark_step()
        for value in (bad, later):
            with pytest.raises(IndexError, match="index out of range"):
                value.cpu()
        assert (torch.ones(2).to("tarry") + 1).tolist() == [2.0, 2.0]
    # The step was one program: all of it is lost, and says so, whatever the backend is now.
    with pytest.raises(IndexError, match="index out of range"):
        good.cpu()
