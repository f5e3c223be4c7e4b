"""Training with replays is training: the same losses, parameters, statistics, optimizer state and gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tarry
from tarry.examples.train_gpt import GPT, GPTConfig
from tests.replay.training import Trainer, batches, mlp, sgd, trainer
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

STEPS = 12
RECORDED = 5  # at most: the first makes the state, two show that the count is in the way, two are the proof
FAST = ["eager", "torchscript"]


@pytest.fixture(params=FAST)
def backend(request: pytest.FixtureRequest) -> Any:
    tarry.set_backend(request.param)
    yield request.param
    tarry.set_backend("eager")


class Tied(nn.Module):
    """The last layer's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 6)
        self.head = nn.Linear(6, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.embed.weight.t() @ self.embed.weight))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def run(trained: Trainer, device: str, step: Any = None) -> list[float]:
    step = step or trained.step
    return [step(x, y).item() for x, y in batches(STEPS, device=device)]


def same_training(
    make_model: Callable[[], nn.Module], make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    eager = trainer("cpu", make_model, make_optimizer)
    expected = run(eager, "cpu")
    watched = trainer("tarry", make_model, make_optimizer)
    step = tarry.compile(watched.step, verify=0)
    losses = run(watched, "tarry", step)
    assert step.replays >= STEPS - RECORDED, step.explain()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(watched.state(), eager.state(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make_model", "make_optimizer"),
    [(mlp, sgd), (mlp, adamw), (normed, sgd), (Tied, sgd)],
    ids=["momentum", "adamw", "batchnorm", "tied"],
)
def test_same_as_eager(backend: str, make_model: Any, make_optimizer: Any) -> None:
    same_training(make_model, make_optimizer)


COUNTING = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam one by one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "groups": lambda p: torch.optim.AdamW([{"params": [q], "weight_decay": 0.1 * k} for k, q in enumerate(p)], lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, momentum_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", COUNTING)
def test_steps_are_counted_on_the_device_in_the_end(name: str) -> None:
    same_training(mlp, lambda model: COUNTING[name](list(model.parameters())))


def test_a_count_stays_on_the_host_where_every_step_is_recorded_anyway() -> None:
    eager, watched = trainer("cpu", mlp, adamw), trainer("tarry", mlp, adamw)
    step = tarry.compile(watched.step, verify=0)
    for k, (x, y) in enumerate(batches(STEPS)):
        for each in (eager, watched):
            each.optimizer.param_groups[0]["weight_decay"] = 0.01 * k
        torch.testing.assert_close(step(x.to("tarry"), y.to("tarry")).cpu(), eager.step(x, y), rtol=1e-4, atol=1e-5)
    assert step.replays == 0
    assert watched.optimizer.param_groups[0]["capturable"] is False
    assert all(state["step"].device.type == "cpu" for state in watched.optimizer.state.values())


def _returns_a_time(trained: Trainer) -> Callable[..., Any]:
    return lambda x, y: (trained.step(x, y), time.perf_counter())[0:2]


def _reads_a_host_tensor(trained: Trainer) -> Callable[..., Any]:
    scale = torch.ones(())
    return lambda x, y: (trained.step(x * scale.item(), y),)


def _changes_a_host_tensor(trained: Trainer) -> Callable[..., Any]:
    calls = torch.zeros(())
    return lambda x, y: (trained.step(x, y), calls.add_(1))[0:1]


def _returns_a_graph(trained: Trainer) -> Callable[..., Any]:
    return lambda x, y: (trained.step(x, y), trained.model(x))


@pytest.mark.parametrize("wrap", [_returns_a_time, _reads_a_host_tensor, _changes_a_host_tensor, _returns_a_graph])
def test_a_count_stays_on_the_host_where_something_else_is_in_the_way(wrap: Callable[[Trainer], Any]) -> None:
    eager, watched = trainer("cpu", mlp, adamw), trainer("tarry", mlp, adamw)
    step, expected = tarry.compile(wrap(watched)), wrap(eager)
    for x, y in batches(STEPS):
        found = step(x.to("tarry"), y.to("tarry"))[0]
        torch.testing.assert_close(found.cpu(), expected(x, y)[0], rtol=1e-4, atol=1e-5)
    assert step.replays == 0
    assert watched.optimizer.param_groups[0]["capturable"] is False


def test_a_count_on_the_device_survives_a_checkpoint(tmp_path: Path) -> None:
    watched = trainer("tarry", mlp, adamw)
    step = tarry.compile(watched.step, verify=0)
    first, then = batches(8), batches(16)[8:]
    for x, y in first:
        step(x.to("tarry"), y.to("tarry"))
    assert step.replays == 8 - RECORDED
    torch.save([watched.model.state_dict(), watched.optimizer.state_dict()], tmp_path / "run.pt")
    expected = [step(x.to("tarry"), y.to("tarry")).item() for x, y in then]

    resumed = trainer("tarry", mlp, adamw)
    model, optimizer = torch.load(tmp_path / "run.pt")
    resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(optimizer)
    step = tarry.compile(resumed.step, verify=0)
    assert [step(x.to("tarry"), y.to("tarry")).item() for x, y in then] == expected
    assert step.replays > 0


@pytest.mark.slow
@pytest.mark.parametrize(("make_model", "make_optimizer"), [(mlp, adamw), (normed, sgd)], ids=["adamw", "batchnorm"])
def test_same_as_eager_with_inductor(make_model: Any, make_optimizer: Any) -> None:
    tarry.set_backend("inductor")
    try:
        same_training(make_model, make_optimizer)
    finally:
        tarry.set_backend("eager")


class Attention(nn.Module):
    """Random in name only: it has no dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*(x.view(1, 1, *x.shape),) * 3).view_as(x)


@pytest.mark.parametrize("layer", [nn.Identity, Attention])
def test_dropout_draws_the_seeds_that_recorded_calls_would_draw(layer: type[nn.Module]) -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.Dropout(0.5), layer(), nn.Linear(8, 8), nn.Dropout(0.3), layer(), nn.Linear(8, 3)
        )

    def losses(compiled: bool) -> tuple[list[float], Tensor]:
        trained = trainer("tarry", model)
        torch.manual_seed(7)
        step = tarry.compile(trained.step, verify=0) if compiled else None
        found = run(trained, "tarry", step)
        assert step is None or step.replays >= STEPS - RECORDED, step.explain()
        return found, torch.tarry.get_rng_state()

    recorded, replayed = losses(False), losses(True)
    assert recorded[0] == replayed[0]
    assert torch.equal(recorded[1], replayed[1])


def test_draws_that_no_graph_needs_count_too() -> None:
    def step(x: Tensor) -> Tensor:
        torch.rand(3, device="tarry")
        kept = torch.rand(3, device="tarry")
        torch.rand(3, device="tarry")
        return x + kept

    def values(fn: Any) -> list[Tensor]:
        torch.manual_seed(3)
        return [fn(torch.zeros(3, device="tarry")).cpu() for _ in range(8)]

    compiled = tarry.compile(step, verify=0)
    torch.testing.assert_close(values(step), values(compiled), rtol=0, atol=0)
    assert compiled.replays > 3


def test_gradient_accumulation_inside() -> None:
    def make(device: str) -> Trainer:
        trained = trainer(device)
        model, optimizer = trained.model, trained.optimizer

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), device=device)
            for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = F.cross_entropy(model(part), target) / 2
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return total

        trained.step = step
        return trained

    eager, watched = make("cpu"), make("tarry")
    compiled = tarry.compile(watched.step, verify=0)
    expected, losses = run(eager, "cpu"), run(watched, "tarry", compiled)
    assert compiled.replays >= STEPS - RECORDED, compiled.explain()
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(watched.state(), eager.state(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["before", "after", "never", "in place"])
def test_gradients_are_cleared_wherever_the_program_does_it(place: str) -> None:
    """Outside, at the end of the function, not at all (they add up), or by writing zeros."""

    def run_on(device: str, compiled: bool) -> tuple[list[Tensor], Any]:
        trained = trainer(device)
        model, optimizer = trained.model, trained.optimizer

        def step(x: Tensor, y: Tensor) -> Tensor:
            if place == "in place":
                optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if place == "after":
                optimizer.zero_grad()
            return loss

        fn = tarry.compile(step, verify=0) if compiled else step
        for x, y in batches(STEPS, device=device):
            if place == "before":
                optimizer.zero_grad()
            fn(x, y)
            assert (model[0].weight.grad is None) == (place == "after")
        return trained.state(), fn

    expected, _ = run_on("cpu", False)
    state, step = run_on("tarry", True)
    assert step.replays >= STEPS - RECORDED, step.explain()
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


def test_host_batches_are_moved_inside() -> None:
    def make(device: str) -> tuple[Trainer, Any]:
        trained = trainer(device)
        inner = trained.step
        return trained, lambda x, y: inner(x.to(device), y.to(device))

    eager, plain = make("cpu")
    watched, moving = make("tarry")
    step = tarry.compile(moving, verify=0)
    for x, y in batches(STEPS):
        torch.testing.assert_close(step(x, y).cpu(), plain(x, y), rtol=1e-4, atol=1e-5)
    assert step.replays >= STEPS - RECORDED, step.explain()
    torch.testing.assert_close(watched.state(), eager.state(), rtol=1e-4, atol=1e-5)


def test_tensors_made_of_numbers_are_constants() -> None:
    def function(x: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 2.0, 3.0], device="tarry") + torch.arange(3).to("tarry")
        return x * weights + torch.tensor([], device="tarry").sum() + torch.tensor(4.0)

    step = tarry.compile(function, verify=0)
    for k in range(6):
        x = torch.full((3,), float(k))
        assert step(x.to("tarry")).tolist() == (x * torch.tensor([1.0, 3.0, 5.0]) + 4).tolist()
    assert step.replays == 4, step.explain()


def test_two_optimizers_make_one_step() -> None:
    def make(device: str) -> tuple[Trainer, Any]:
        first, second = trainer(device), trainer(device)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return first.step(x, y), second.step(x * 2, y)

        return second, step

    eager, plain = make("cpu")
    watched, both = make("tarry")
    step = tarry.compile(both, verify=0)
    for x, y in batches(STEPS):
        expected = plain(x, y)
        for mine, theirs in zip(step(x.to("tarry"), y.to("tarry")), expected, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)
    assert step.replays >= STEPS - RECORDED, step.explain()
    torch.testing.assert_close(watched.state(), eager.state(), rtol=1e-4, atol=1e-5)


def test_autocast_and_checkpointing_inside() -> None:
    from torch.utils.checkpoint import checkpoint

    def make(device: str) -> Trainer:
        trained = trainer(device, lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3)))
        model, optimizer = trained.model, trained.optimizer

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                logits = checkpoint(model, x, use_reentrant=False)
            loss = F.cross_entropy(logits.float(), y)
            loss.backward()
            optimizer.step()
            return loss

        trained.step = step
        return trained

    eager, watched = make("cpu"), make("tarry")
    step = tarry.compile(watched.step, verify=0)
    expected, losses = run(eager, "cpu"), run(watched, "tarry", step)
    assert step.replays >= STEPS - RECORDED, step.explain()
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)


def _train_gpt(steps: int, compiled: bool) -> tuple[list[float], int]:
    """What real training has: groups for weight decay, warm-up and cosine, accumulation, clipping, bf16 autocast,
    activation checkpointing, dropout."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=20, layers=2, width=16, context=16, dropout=0.1, recompute=True)).to("tarry")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / 5) * (1 + math.cos(k / 30)))

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device="tarry")
        for part in tokens.unbind(0):
            with torch.autocast("tarry", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / len(tokens)
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    called: Any = tarry.compile(step, verify=0) if compiled else step
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        losses.append(called(torch.randint(20, (2, 3, 17), generator=data).to("tarry")).item())
        scheduler.step()
    return losses, called.replays if compiled else 0


def test_real_training_is_replayed() -> None:
    expected, _ = _train_gpt(STEPS, compiled=False)
    losses, replays = _train_gpt(STEPS, compiled=True)
    assert replays == STEPS - RECORDED
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-3, atol=1e-3)
