"""Steps as graphs with fixed addresses (backends/inductor/capture.py), with a stand-in for CUDA's: a function that is
run again on the memory that it was recorded with. Those of a GPU are in tests/gpu/test_cuda_graphs.py."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tarry
from tarry.backends.base import Backend, Capabilities, Computation
from tarry.backends.fx import lower, takes_number
from tarry.backends.inductor import capture
from tarry.backends.inductor.composed import Raw, compose
from tarry.ir import parse
from tarry.ir.evaluate import drawing_from
from tarry.ir.graph import Graph, Node, Number
from tarry.passes.pieces import Pieces
from tarry.passes.split import split
from tarry.runtime import variants

USES_DEVICE = True
_why_not = capture._why_not  # the true one


def _at_same_address(tensor: Tensor) -> Tensor:
    """The tensor's elements, without a claim to its memory: a graph knows addresses only."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (extent * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


class Recording:
    """What a function did to some tensors, to be done again."""

    made: dict[int, Recording] = {}
    numbers = itertools.count(1)

    def __init__(
        self, function: Callable[[list[Any]], Sequence[Any]], arguments: list[Tensor], generators: Sequence[Any]
    ) -> None:
        self.generators = generators
        self.positions = arguments[-1] if generators else None  # on the host: no kernel of a CUDA graph reads them
        self.function = function
        self.arguments = list(map(_at_same_address, arguments))
        with drawing_from(generators):
            self.given = function([argument.clone() for argument in arguments])
        self.results = list(map(_at_same_address, self.given))
        self.launches = 0
        self.number = next(self.numbers)
        self.made[self.number] = self

    def launch(self) -> None:
        self.launches += 1
        with drawing_from(self.generators):
            results = self.function(list(self.arguments))
        for place, result in zip(self.results, results, strict=True):
            place.copy_(result)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def _launch(graph: int, stream: int | None) -> int:
    Recording.made[graph].launch()
    return 0


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _replay(captured: int) -> None:
    Recording.made[captured].launch()


def _record(
    function: Callable[[list[Any]], Sequence[Any]], arguments: list[Tensor], generators: Sequence[Any]
) -> capture.Recorded:
    made = Recording(function, arguments, generators)
    launch, replay = (capture._address(each) for each in (_launch, _replay))
    results, made.given = made.given, ()
    if generators:
        return capture.Recorded(0, made.number, replay, made.number, made, results)
    return capture.Recorded(launch, made.number, 0, 0, made, results)


class Captured(Backend):
    """FX graphs, captured."""

    name = "captured"

    def __init__(self, ahead: bool, pieces: bool = False) -> None:
        super().__init__("cpu")
        self.capabilities = Capabilities(updates_in_place=True, pieces=pieces)
        self.ahead = ahead
        self.raws: dict[int, Raw] = {}  # by the identity of the computation
        self.counts: Counter[str] = Counter()
        self.captures: list[capture.Capture] = []
        self.kept: list[Computation] = []

    def takes_number(self, node: Node, number: Number, varied: bool) -> bool:
        return takes_number(node, number, varied)

    def runs_ahead(self, graph: Graph) -> bool:
        return self.ahead

    def compile(self, graph: Graph) -> Computation:
        program = lower(graph, "cpu")

        def function(arguments: list[Any]) -> Sequence[Any]:
            given = list(arguments)
            arguments.clear()  # as Inductor's programs do
            made: Sequence[Any] = program.module(*given)
            return made

        return self._captured(graph, Raw(program, function), str(program.module.code))

    def compose(self, graph: Graph, pieces: Pieces, parts: Sequence[Computation]) -> Computation:
        return self._captured(graph, compose(graph, pieces, [self.raws[id(part)] for part in parts]), "")

    def _captured(self, graph: Graph, raw: Raw, text: str) -> Computation:
        made = capture.Capture(raw.signature, raw.function, self.counts)
        self.captures.append(made)
        computation = Computation(made.run, graph, raw.signature.in_place, text, made.program)
        self.raws[id(computation)] = raw
        self.kept.append(computation)
        return computation

    @property
    def copied(self) -> int:
        """Inputs that are copied before launches, of all programs."""
        return sum(len(made._copied) for made in self.captures)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(capture, "record", _record)
    monkeypatch.setattr(capture, "_why_not", lambda program: "")
    monkeypatch.setattr(variants, "split", lambda *graph, little_late: split(*graph, little_late=True))  # as on a GPU
    Recording.made = {}
    yield
    tarry.set_backend("eager")


@pytest.fixture(
    params=[(False, False), (True, False), (False, True), (True, True)],
    ids=["whole", "ahead", "pieces", "pieces ahead"],
)
def backend(request: pytest.FixtureRequest) -> Captured:
    made = Captured(*request.param)
    tarry.set_backend(made)
    return made


Between = Callable[[int, nn.Module], None]


def _train(device: str, steps: int, between: Between = lambda step, net: None, fresh: bool = False) -> list[float]:
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh())]
    net = nn.Sequential(nn.Linear(8, 32), *hidden, nn.LayerNorm(32), nn.Linear(32, 16)).double().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    batches = torch.randn(steps if fresh else 1, 16, 8).double()
    uploaded = batches[0].to(device)
    losses = []
    for step in range(steps):
        between(step, net)
        x = batches[step].to(device) if fresh else uploaded
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _assert_close(actual: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-6, atol=1e-8)


def test_what_stays_where_it_is_is_not_copied(backend: Captured) -> None:
    _assert_close(_train("tarry", 16), _train("cpu", 16))
    parts = 2 if backend.ahead else 1
    assert backend.counts == {"cuda_graphs": parts}, "each part of the steady step is captured once"
    assert backend.copied == 0
    assert all(recording.launches >= 8 for recording in Recording.made.values())


def test_batches_that_lie_elsewhere_each_time_are_copied(backend: Captured) -> None:
    keep = []

    def fill(step: int, net: nn.Module) -> None:
        keep.append(torch.empty(16, 8).double())  # so that no two batches get the same memory

    _assert_close(_train("tarry", 24, fill, fresh=True), _train("cpu", 24, fill, fresh=True))
    assert backend.copied <= 2 * (2 if backend.ahead else 1), "the batch, and nothing else"
    assert max(recording.launches for recording in Recording.made.values()) >= 8


def test_parameters_may_move_now_and_then(backend: Captured) -> None:
    def move(step: int, net: nn.Module) -> None:
        if step in (8, 9, 14):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.data = parameter.detach().clone()

    _assert_close(_train("tarry", 24, move), _train("cpu", 24, move))
    assert sum(recording.launches for recording in Recording.made.values()) >= 8


def test_results_that_are_held_keep_their_values(backend: Captured) -> None:
    def held(device: str) -> list[Tensor]:
        seen: list[Tensor] = []

        def hold(step: int, net: nn.Module) -> None:
            first = next(net.parameters())
            if first.grad is not None:
                seen.extend([first.grad, first.detach().clone()])

        _train(device, 14, hold)
        return [tensor.cpu() for tensor in seen]

    for ours, theirs in zip(held("tarry"), held("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_a_program_whose_inputs_never_stay_is_given_up() -> None:
    backend = Captured(ahead=False)
    tarry.set_backend(backend)
    keep = []
    for step in range(40):
        x = torch.full((300,), float(step)).to("tarry")
        keep.append(x)
        assert (x * 2).sum().item() == 600 * step
    assert backend.counts["cuda_graphs"] <= capture.MAX_CAPTURES


def test_a_step_that_is_replayed_launches_its_graphs(backend: Captured) -> None:
    def train(device: str) -> tuple[list[float], int]:
        torch.manual_seed(0)
        hidden = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
        net = nn.Sequential(nn.Linear(8, 32), *hidden, nn.Linear(32, 16)).double().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(16, 8).double().to(device)

        def step(x: Tensor) -> Tensor:
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        replayed = tarry.compile(step)
        losses = [(replayed if device == "tarry" else step)(x).item() for _ in range(20)]
        return losses, replayed.replays

    ours, replays = train("tarry")
    _assert_close(ours, train("cpu")[0])
    assert replays >= 12
    assert backend.copied == 0
    assert all(recording.launches >= 8 for recording in Recording.made.values())


def test_old_gradients_of_a_big_model_are_moved_out_of_the_way() -> None:
    """The next step begins before `zero_grad` has been reached: there, the device has waited too long already."""
    backend = Captured(ahead=True)
    tarry.set_backend(backend)

    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [layer for _ in range(12) for layer in (nn.Linear(500, 500), nn.Tanh())]
        net = nn.Sequential(*layers).double().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(2, 500).double().to(device)
        seen = []
        for _ in range(16):
            loss = net(x).square().mean()
            if (old := layers[0].weight.grad) is not None:
                seen.append(old.sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        return [value.cpu() for value in seen]

    for ours, theirs in zip(train("tarry"), train("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    assert backend.copied <= 1, "the old gradient that is read"
    assert tarry.metrics.counters()["run_ahead"] >= 3


def test_random_operators_draw_what_they_draw_on_the_reference_path(backend: Captured) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(3)
        x = torch.linspace(0, 1, 64).to("tarry")
        return [(torch.bernoulli(x) * torch.rand_like(x) + torch.rand_like(x)).cpu() for _ in range(6)]

    made = run()
    assert sum(recording.launches for recording in Recording.made.values()) > 0
    assert all(len(recording.generators) == 3 for recording in Recording.made.values())
    tarry.set_backend("eager")
    torch.testing.assert_close(made, run(), rtol=0, atol=0)
    assert len({tuple(each.tolist()) for each in made}) == 6


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize("ahead", [False, True])
def test_pieces_that_draw_become_one_graph(ahead: bool) -> None:
    """Each with seeds and numbers of its own, though they share a program."""

    def train() -> list[Tensor]:
        torch.manual_seed(3)
        blocks = [layer for _ in range(10) for layer in (nn.Linear(8, 8), nn.Tanh(), Noise(), nn.LayerNorm(8))]
        net = nn.Sequential(*blocks).to("tarry")
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-2)  # a smaller one enlarges rounding
        x = torch.randn(4, 8).to("tarry")
        for _ in range(12):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in net.parameters()]

    backend = Captured(ahead, pieces=True)
    tarry.set_backend(backend)
    made = train()
    assert tarry.metrics.counters()["pieces"] > 20
    assert len(Recording.made) == backend.counts["cuda_graphs"] <= 4, "of whole parts, not of pieces"
    assert max(len(recording.generators) for recording in Recording.made.values()) == 10
    tarry.set_backend("eager")
    torch.testing.assert_close(made, train(), rtol=1e-5, atol=1e-6)


def test_numbers_that_a_custom_operator_needs_are_no_seeds() -> None:
    graph = parse("""
graph(%0: f32[4]):
  %1: f32[4] = aten::bernoulli.p(%0, 0.5, generator=$0=seed(5))
  return %1
""")
    program = lower(graph, "cpu")
    assert [vector.on_host for vector in program.vectors] == [True]
    assert "on the host" not in _why_not(program)
    numbers = (Number(0, "number", torch.int64, 5),)
    assert "on the host" in _why_not(dataclasses.replace(program, graph=dataclasses.replace(graph, numbers=numbers)))
