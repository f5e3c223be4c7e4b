"""Step functions whose surroundings change, or that change them, by name. The modules `corpus_*` fill the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.replay.hostile import Make

STEPS: dict[str, Make] = {}
CHANGE = 9


def step(function: Make) -> Make:
    STEPS[function.__name__] = function
    return function


def at(k: int, action: Callable[[], object]) -> Callable[[int], object]:
    """Before call k."""
    return lambda now: action() if now == k else None


def trained(device: str, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    made = optimizer(model.parameters(), **{"lr": 0.05, **settings})

    def train(x: Tensor) -> Tensor:
        made.zero_grad()
        loss = (model(x) - 1).pow(2).mean()
        loss.backward()
        made.step()
        return loss.detach()

    return model, made, train


def values(model: nn.Module) -> Callable[[], list[Tensor]]:
    return lambda: [*model.parameters(), *model.buffers()]
