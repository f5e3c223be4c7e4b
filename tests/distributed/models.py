"""Small models as people train them on several processes, and the loop that trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tarry

VOCABULARY = 32
LENGTH = 8
WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        # The number of heads follows from the layers: a rank may have some of them only.
        heads = [layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(device: str) -> GPT:
    torch.manual_seed(0)
    return GPT().to(device)


def cnn(device: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(8, 5)),
    )
    return model.to(device)


def texts(device: str) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCABULARY, (4, LENGTH + 1))
    return drawn[:, :-1].to(device), drawn[:, 1:].to(device)


def pictures(device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8).to(device), torch.randint(5, (4,)).to(device)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]).float(), targets.reshape(-1))


def train(
    model: nn.Module,
    optimizer: Any,
    batch: Callable[[str], tuple[Tensor, Tensor]],
    device: str,
    *,
    steps: int = 5,
    seed: int = 7,
    step: Callable[[nn.Module, Any, Callable[[], tuple[Tensor, Tensor]]], Tensor] | None = None,
) -> tuple[Tensor, list[int]]:
    """The losses, and how often each step was cut."""
    torch.manual_seed(seed)
    losses, cuts = [], []
    for _ in range(steps):
        before = tarry.metrics.counters().get("sync", 0)
        losses.append((step or one_step)(model, optimizer, lambda: batch(device)).detach())
        cuts.append(tarry.metrics.counters().get("sync", 0) - before)
    return torch.stack(losses).cpu(), cuts


def one_step(model: nn.Module, optimizer: Any, batch: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    x, y = batch()
    loss = loss_of(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
