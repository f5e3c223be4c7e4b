"""Steps in pieces: trained as by eager, each kind compiled once, and all or nothing when one of them fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tarry
from tarry.backends.base import Capabilities
from tarry.events import record
from tests.backends.simple import using
from tests.backends.test_updates import InPlace
from tests.runtime.portable import Portable

USES_DEVICE = True
DEPTH = 12

Optimizer = Callable[..., torch.optim.Optimizer]


class InPieces(InPlace):
    name = "in pieces"
    capabilities = Capabilities(updates_in_place=True, pieces=True)


class PortablePieces(Portable):
    """On module level: the process that compiles imports it by its name."""

    capabilities = Capabilities(pieces=True)


class Block(nn.Module):
    """Reads a table by the given indices, so that it can fail; one of its intermediates can be looked at."""

    def __init__(self, width: int = 8, dropout: float = 0.0, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = shared or nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.table = nn.Embedding(5, width)
        self.dropout = nn.Dropout(dropout)
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.seen = nn.functional.gelu(self.inner(self.norm(x)))
        return x + self.dropout(self.outer(self.seen)) + self.table(ids)


class Network(nn.Module):
    def __init__(self, depth: int = DEPTH, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(depth))

    def forward(self, x: torch.Tensor, ids: list[torch.Tensor]) -> torch.Tensor:
        for block, chosen in zip(self.blocks, ids, strict=True):
            x = block(x, chosen)
        return x.square().mean()


def _ids(device: str, depth: int = DEPTH) -> list[torch.Tensor]:
    return [torch.tensor([k % 5, 1, 2]).to(device) for k in range(depth)]


def _train(
    device: str, net: nn.Module, optimizer: Optimizer, steps: int = 4, accumulate: int = 1
) -> list[torch.Tensor]:
    net = net.to(device)
    chosen = optimizer(net.parameters())
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        chosen.zero_grad()
        for _ in range(accumulate):
            loss = net(torch.randn(3, 8).to(device), _ids(device))
            loss.backward()
        chosen.step()
        losses.append(loss.detach())
    return [tensor.detach().cpu() for tensor in (*losses, *net.parameters())]


def _same(mine: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training(optimizer: Optimizer, accumulate: int) -> None:
    wanted = _train("cpu", Network(), optimizer, accumulate=accumulate)
    with using(InPieces()) as backend, record() as seen:
        _same(_train("tarry", Network(), optimizer, accumulate=accumulate), wanted)
    found = [event.fields for event in seen if event.kind == "pieces"]
    assert found
    assert all(fields["calls"] > fields["kinds"] for fields in found)
    assert all(len(graph.nodes) < 400 for graph in backend.graphs)


def test_it_can_be_turned_off() -> None:
    with using(InPieces()) as backend, tarry.config.override(compile_pieces=False), record() as seen:
        _train("tarry", Network(), OPTIMIZERS["SGD"], steps=2)
    assert not [event for event in seen if event.kind == "pieces"]
    assert max(len(graph.nodes) for graph in backend.graphs) > 300


def test_shared_parameters_are_updated_once() -> None:
    def net() -> nn.Module:
        torch.manual_seed(3)
        return Network(shared=nn.Linear(8, 16))

    wanted = _train("cpu", net(), OPTIMIZERS["AdamW"])
    with using(InPieces()), record() as seen:
        _same(_train("tarry", net(), OPTIMIZERS["AdamW"]), wanted)
    assert [event for event in seen if event.kind == "pieces"]


def test_an_intermediate_that_the_user_keeps() -> None:
    def kept(device: str) -> list[torch.Tensor]:
        net = Network()
        made = _train(device, net, OPTIMIZERS["SGD"])
        assert isinstance(net.blocks[5], Block)
        assert net.blocks[5].seen is not None
        return [*made, net.blocks[5].seen.detach().cpu()]

    wanted = kept("cpu")
    with using(InPieces()):
        _same(kept("tarry"), wanted)


def test_dropout_draws_what_the_reference_path_draws() -> None:
    def trained() -> list[torch.Tensor]:
        return _train("tarry", Network(dropout=0.3), OPTIMIZERS["AdamW"])

    with using("eager"):
        wanted = trained()
    with using(InPieces()), record() as seen:
        _same(trained(), wanted)
    assert [event for event in seen if event.kind == "pieces"]


def _fails_in_the_middle(backend: Any) -> None:
    with using(backend):
        net = Network().to("tarry")
        chosen = torch.optim.AdamW(net.parameters(), lr=0.1)
        x = torch.randn(3, 8).to("tarry")

        def step(ids: list[torch.Tensor]) -> None:
            chosen.zero_grad()
            net(x, ids).backward()
            chosen.step()

        def step_and_wait(ids: list[torch.Tensor]) -> None:
            step(ids)
            tarry.sync()

        for _ in range(3):
            step_and_wait(_ids("tarry"))
        before = [p.detach().cpu() for p in net.parameters()]
        wrong = _ids("tarry")
        wrong[DEPTH // 2] = torch.tensor([0, 77, 1]).to("tarry")
        with pytest.raises(IndexError):
            step_and_wait(wrong)
        for p, old in zip(net.parameters(), before, strict=True):
            assert torch.equal(p.detach().cpu(), old)
        step(_ids("tarry"))
        assert not any(torch.equal(p.detach().cpu(), old) for p, old in zip(net.parameters(), before, strict=True))


def test_a_failure_in_a_middle_layer_changes_no_parameter() -> None:
    _fails_in_the_middle(InPieces())


def test_another_depth_finds_its_layers_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(tarry.config), "cache_dir", property(lambda self: tmp_path))
    forward = [torch.tensor([1, 2, 3])] * 30

    def run(depth: int) -> tuple[int, int]:
        with using(PortablePieces()), tarry.config.override(store=True), record() as seen:
            net = Network(depth).to("tarry")
            with torch.no_grad():
                net(torch.randn(3, 8).to("tarry"), [ids.to("tarry") for ids in forward[:depth]]).item()
        kinds = [event.kind for event in seen]
        return kinds.count("store_hit"), kinds.count("store_miss")

    hits, compiled = run(20)
    assert (hits, compiled > 0) == (0, True)
    hits, missed = run(26)
    assert hits > 0, "the layer itself"
    assert missed < compiled, "what is before and after all layers at most"


@pytest.mark.slow
def test_in_the_background_each_kind_is_compiled_once(tmp_path: Path) -> None:
    backend = PortablePieces(diary=tmp_path / "diary")
    with using(backend), tarry.config.override(compile="background", store=False), record() as seen:
        net = Network(20).to("tarry")
        x, ids = torch.randn(3, 8).to("tarry"), _ids("tarry", 20)
        with torch.no_grad():
            losses = [net(x, ids).item() for _ in range(2)]
            assert tarry.wait_for_compiles(120)
            losses.append(net(x, ids).item())
    (fields,) = [event.fields for event in seen if event.kind == "pieces"]
    assert len(backend.compilers()) == fields["kinds"] < fields["calls"]
    assert os.getpid() not in backend.compilers()
    assert losses == pytest.approx([losses[0]] * 3)


def test_the_text_names_each_piece_once() -> None:
    with using(InPieces()):
        net = Network(24).to("tarry")
        with torch.no_grad():
            loss = net(torch.randn(3, 8).to("tarry"), _ids("tarry", 24))
        text = tarry.explain(loss, stage="compiled")
    assert "pieces in order" in text
    assert text.count("# piece ") < 6


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [True, False])
def test_inductor(run_ahead: bool) -> None:
    wanted = _train("cpu", Network(), OPTIMIZERS["AdamW"], steps=6)
    with using("inductor"), tarry.config.override(run_ahead=run_ahead), record() as seen:
        _same(_train("tarry", Network(), OPTIMIZERS["AdamW"], steps=6), wanted)
    found = [event.fields for event in seen if event.kind == "pieces"]
    assert found
    assert all(fields["kinds"] < fields["calls"] for fields in found)
    assert not [event for event in seen if event.kind in ("error", "interpreted")]


@pytest.mark.slow
def test_inductor_fails_in_the_middle() -> None:
    _fails_in_the_middle("inductor")
