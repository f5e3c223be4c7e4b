"""Small training programs, each run three ways: eagerly on the CPU, recorded, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tarry

Step = Callable[..., Any]


@dataclass
class Trainer:
    """A model, its optimizer and a step function that closes over them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step

    def state(self) -> list[Tensor]:
        """All that a step changes, on the host."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return [tensor.detach().cpu().clone() for tensor in tensors]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trainer(
    device: str = "tarry",
    make_model: Callable[[], nn.Module] = mlp,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> Trainer:
    """The usual step: zero_grad, loss, backward, step."""
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = make_optimizer(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Trainer(model, optimizer, step)


def batches(count: int, size: int = 4, device: str = "cpu", features: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, features, generator=generator).to(device),
            torch.randint(3, (size,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def replayed(trained: Trainer) -> Any:
    """Its step, called until it is replayed."""
    step = tarry.compile(trained.step, verify=0)
    warm(step)
    return step


def warm(step: Any, size: int = 4) -> None:
    for x, y in batches(4, size, "tarry"):
        step(x, y)
    assert step.replays >= 1, step.explain()
