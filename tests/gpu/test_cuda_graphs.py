"""Steps as CUDA graphs: what is held from one step to the next keeps its value, and inputs may be anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tarry
from tarry.backends.inductor import InductorBackend

pytestmark = pytest.mark.gpu

Between = Callable[[int, nn.Module], None]


@pytest.fixture(autouse=True)
def _as_graphs() -> Iterator[None]:
    tarry.set_backend(InductorBackend("cuda"), "cuda", compile="wait")
    yield
    tarry.set_backend("eager", device="cpu")


def _graphs() -> float:
    return tarry.metrics.counters().get("inductor/cuda_graphs", 0)


def _train(
    device: str, steps: int, between: Between = lambda step, net: None, held: list[Tensor] | None = None
) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        between(step, net)
        x = torch.randn(4, 8).to(device)
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if held is not None:
            held.extend([loss.detach(), net[0].weight.grad])
    return losses


def _close(actual: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-3, atol=1e-4)


def test_a_training_step_becomes_one_graph() -> None:
    _close(_train("tarry", 12), _train("cpu", 12))
    assert _graphs() >= 1


def test_what_is_held_keeps_its_value() -> None:
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    _train("tarry", 8, held=ours)
    _train("cpu", 8, held=theirs)
    assert _graphs() >= 1
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-4)


def test_parameters_may_move() -> None:
    def move(step: int, net: nn.Module) -> None:
        if step in (5, 6, 9):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.data = parameter.detach().clone()

    _close(_train("tarry", 14, move), _train("cpu", 14, move))


def test_a_parameter_that_somebody_sees_is_not_written_under_him() -> None:
    seen: list[Tensor] = []

    def look(step: int, net: nn.Module) -> None:
        if step >= 4:
            seen.append(next(net.parameters()).detach().clone())

    _train("tarry", 8, look)
    ours, seen = seen, []
    _train("cpu", 8, look)
    for a, b in zip(ours, seen, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-4)


def test_dropout_on_the_device_is_captured() -> None:
    tarry.set_backend(InductorBackend("cuda", device_random=True), "cuda", compile="wait")
    torch.manual_seed(1)
    x = torch.ones(1000, device="tarry")
    sums = [torch.nn.functional.dropout(x, 0.5).sum().item() for _ in range(8)]
    assert len(set(sums)) > 4, "each step draws new numbers"
    assert all(800 < s < 1200 for s in sums)
    assert _graphs() >= 1


def _attention(x: Tensor) -> Tensor:
    q = x.view(2, 2, 32, 8).requires_grad_()
    k, v = q.detach() * 2, q.detach() + 1
    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
    (gradient,) = torch.autograd.grad(mixed.square().sum(), q)
    return torch.stack([mixed, gradient])


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.3) + F.dropout(x, 0.5),
    "noise": lambda x: torch.rand_like(x) + torch.randn_like(x) * torch.bernoulli(x.sigmoid()),
    "in place": lambda x: x * torch.empty_like(x).uniform_(1, 2) + torch.empty_like(x).exponential_(),
    "attention in f32": _attention,
    "attention in bf16": lambda x: _attention(x.bfloat16()).float(),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_graph_draws_what_the_reference_path_draws(kind: str) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 1024).to("tarry")
        return [DRAWS[kind](x).detach().cpu() for _ in range(8)]

    tarry.metrics.reset()
    ours = run()
    assert _graphs() >= 1
    assert "inductor/not_captured" not in tarry.metrics.counters()
    tarry.set_backend("eager", device="cuda")
    expected = run()
    tolerance = 2e-2 if "bf16" in kind else 1e-3
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    assert len({tuple(each.flatten().tolist()) for each in ours}) == 8, "each step draws new numbers"


def _train_with_dropout(steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh())]
    net = nn.Sequential(*layers, nn.Linear(32, 1)).to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for step in range(steps):
        x = torch.randn(16, 32).to("tarry")
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % 8 == 3:
            net.eval()
            losses.append(net(x).mean().detach())
            net.train()
    return [loss.cpu() for loss in losses]


def test_a_step_with_dropout_runs_ahead() -> None:
    tarry.metrics.reset()
    ours = _train_with_dropout(40)
    counters = tarry.metrics.counters()
    assert counters["inductor/cuda_graphs"] >= 1
    assert counters["run_ahead"] > 0
    tarry.set_backend("eager", device="cuda")
    torch.testing.assert_close(ours, _train_with_dropout(40), rtol=1e-3, atol=1e-3)


def test_other_streams_are_obeyed() -> None:
    x = torch.ones(64, device="tarry")
    for _ in range(6):
        with torch.cuda.stream(torch.cuda.Stream()):
            y = (x * 2 + 1).sum()
            assert y.item() == 192


def _train_deep(device: str, steps: int) -> list[Tensor]:
    """Deep enough to come in two parts. Some gradients are kept for a while, some parameters looked at or written."""
    torch.manual_seed(0)
    # No bias before BatchNorm: its gradient is rounding error, which AdamW would make much of.
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh())]
    net = nn.Sequential(*layers, nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    seen, held = [], []
    for step in range(steps):
        x = torch.randn(16, 32).to(device)
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().cpu())
        if step % 4 == 1:
            held.append(net[0].weight.grad)
        if step % 8 == 5:
            seen.append(net[0].weight.detach().cpu().clone())
        if step % 16 == 9:
            with torch.no_grad():
                net[3].weight.mul_(0.5)
    return [*seen, *(gradient.cpu() for gradient in held), *(value.cpu() for value in net.state_dict().values())]


def test_a_loss_is_read_while_the_rest_of_its_step_is_computed() -> None:
    tarry.metrics.reset()
    ours = _train_deep("tarry", 64)
    assert tarry.metrics.counters()["handed_over"] > 0
    for a, b in zip(ours, _train_deep("cpu", 64), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
