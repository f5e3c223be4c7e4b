"""Training programs small enough that overhead shows, each an ordinary PyTorch step."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer


def _script(path: Path) -> Any:
    """A script as a module, read from its file: importing it by its package would import tarry."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from tarry.examples.train_gpt import GPT, GPTConfig
else:
    _train_gpt = _script(Path(__file__).parent.parent / "tarry" / "examples" / "train_gpt.py")
    GPT, GPTConfig = _train_gpt.GPT, _train_gpt.GPTConfig


@dataclass(frozen=True)
class Program:
    """A model, its optimizer, a batch on the CPU, and the loss of a batch."""

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    autocast: bool = False  # to bf16


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def mlp() -> nn.Module:
    """Eight layers of 64."""
    layers: list[nn.Module] = []
    for _ in range(7):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def resnet() -> nn.Module:
    """Six residual blocks of 16 channels."""
    blocks = [Residual(16) for _ in range(6)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


VOCABULARY = 96
PROGRAMS = (
    Program(
        "MLP 8x64 b32 SGD",
        mlp,
        sgd,
        lambda: (torch.randn(32, 64), torch.randint(10, (32,))),
        F.cross_entropy,
    ),
    Program(
        "GPT 4x128 8x64 AdamW",
        lambda: GPT(GPTConfig(vocabulary=VOCABULARY, layers=4, width=128)),
        adamw,
        lambda: (torch.randint(VOCABULARY, (8, 64)), torch.randint(VOCABULARY, (8, 64))),
        token_loss,
    ),
    Program(
        "ResNet 6x16 b16 SGD",
        resnet,
        sgd,
        lambda: (torch.randn(16, 3, 16, 16), torch.randint(10, (16,))),
        F.cross_entropy,
    ),
)

GPT2 = Program(
    "GPT-2 small 8x1024 bf16 AdamW",
    lambda: GPT(GPTConfig(vocabulary=50257, layers=12, heads=12, width=768, context=1024)),
    adamw,
    lambda: (torch.randint(50257, (8, 1024)), torch.randint(50257, (8, 1024))),
    token_loss,
    autocast=True,
)
"""For a GPU: a step takes seconds on a CPU."""


def _gpt(layers: int) -> nn.Module:
    return GPT(GPTConfig(vocabulary=VOCABULARY, layers=layers, width=128))


DEPTHS = tuple(
    Program(
        f"GPT by depth {layers}",
        partial(_gpt, layers),
        adamw,
        lambda: (torch.randint(VOCABULARY, (8, 64)), torch.randint(VOCABULARY, (8, 64))),
        token_loss,
    )
    for layers in (2, 4, 8, 16, 32)
)
"""What compiling costs where layers repeat."""

MEMORY_PROGRAMS = (
    *PROGRAMS,
    Program(
        "GPT 4x256 16x128 AdamW",
        lambda: GPT(GPTConfig(vocabulary=VOCABULARY, layers=4, width=256, context=128)),
        adamw,
        lambda: (torch.randint(VOCABULARY, (16, 128)), torch.randint(VOCABULARY, (16, 128))),
        token_loss,
    ),
    Program(
        "GPT 4x256 16x128 AdamW recomputed",
        lambda: GPT(GPTConfig(vocabulary=VOCABULARY, layers=4, width=256, context=128, recompute=True)),
        adamw,
        lambda: (torch.randint(VOCABULARY, (16, 128)), torch.randint(VOCABULARY, (16, 128))),
        token_loss,
    ),
)
"""Programs whose memory is compared: in the last two, activations weigh more than weights."""

ALL_PROGRAMS = {program.name: program for program in (*MEMORY_PROGRAMS, GPT2)}
