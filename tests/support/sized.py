"""Programs with a size that varies from step to step: training steps and a generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class SizedProgram:
    """A model, and the batch of each size. `compiles`: how many programs its training may take."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    sizes: tuple[int, ...]
    compiles: int = 2


class TinyGPT(nn.Module):
    """One layer of attention over token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 8), nn.Embedding(64, 8)
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, 8))
        logits: Tensor = x @ self.tokens.weight.T
        return logits.flatten(0, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def convolutional() -> nn.Module:
    features = (nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(4, 3))


def _labels(count: int, classes: int) -> Tensor:
    return torch.arange(count) % classes


def _text(batch: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = (torch.arange(batch * (length + 1)) * 7 % 16).view(batch, length + 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


PROGRAMS = (
    SizedProgram("mlp, batch", mlp, lambda n: (torch.randn(n, 6), _labels(n, 3)), (8, 7, 6, 5, 12, 3)),
    SizedProgram("gpt, length", TinyGPT, lambda n: _text(2, n), (8, 6, 5, 9, 13, 3)),
    SizedProgram("gpt, batch", TinyGPT, lambda n: _text(n, 8), (4, 6, 5, 9)),
    SizedProgram("batch norm, batch", normed, lambda n: (torch.randn(n, 6), _labels(n, 3)), (8, 7, 6, 12)),
    SizedProgram(
        "convolution, height", convolutional, lambda n: (torch.randn(2, 2, n, 6), _labels(2, 3)), (8, 7, 10, 5)
    ),
)


def losses(program: SizedProgram, sizes: Sequence[int], device: str) -> list[float]:
    """The loss of each step of a training with batches of these sizes."""
    torch.manual_seed(0)
    model = program.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for size in sizes:
        if isinstance(model, nn.Sequential) and size == 1 and any(isinstance(m, nn.BatchNorm1d) for m in model):
            continue
        x, y = (tensor.to(device) for tensor in program.batch(size))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def generate(device: str, new: int) -> list[Any]:
    """Greedy generation by attention to a cache that grows by `torch.cat`."""
    torch.manual_seed(0)
    model = TinyGPT().to(device)
    tokens = torch.tensor([[3, 1, 4]]).to(device)
    keys = values = None
    fed = tokens
    with torch.no_grad():
        for _ in range(new):
            length = fed.shape[1]
            start = tokens.shape[1] - length
            x = model.tokens(fed) + model.positions(torch.arange(start, start + length, device=device))
            q, k, v = model.qkv(model.norm(x)).view(1, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            keys = k if keys is None else torch.cat([keys, k], dim=2)
            values = v if values is None else torch.cat([values, v], dim=2)
            mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=start == 0)
            x = x + model.out(mixed.transpose(1, 2).reshape(1, length, 8))
            fed = (x[:, -1] @ model.tokens.weight.T).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, fed], dim=1)
            if int(fed) == 99:
                break
    result: list[Any] = tokens.tolist()
    return result
