"""The model and the text of `tarry demo`: plain PyTorch, with nothing in it that knows of tarry."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; the defaults train on one core in seconds."""

    vocabulary: int
    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 64


class Block(nn.Module):
    """One transformer layer: causal self-attention, then a two-layer perceptron, each on a residual path."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer whose output layer shares its weight with the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text(seed: int, sentences: int = 600) -> str:
    """A made-up ship's log: regular enough that a tiny model learns something from it in a minute."""
    choose = random.Random(seed).choice
    subjects = ("the cook", "the mate", "a gull", "the old boatswain", "our captain", "the new hand")
    verbs = ("watches", "mends", "forgets", "counts", "paints", "finds")
    things = ("the sails", "a barrel of tar", "three ropes", "the lantern", "a map", "the anchor")
    times = ("before dawn", "at noon", "in the rain", "while the wind sleeps", "twice", "without a word")
    return "".join(f"{choose(subjects)} {choose(verbs)} {choose(things)} {choose(times)}.\n" for _ in range(sentences))


class Batches:
    """Random windows of a text, as token numbers on the CPU; the same seed gives the same sequence of batches."""

    def __init__(self, corpus: str, *, size: int, context: int, seed: int) -> None:
        letters = sorted(set(corpus))
        self.vocabulary = len(letters)
        number = {letter: index for index, letter in enumerate(letters)}
        self._tokens = torch.tensor([number[letter] for letter in corpus])
        self._size = size
        self._context = context
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self._tokens) - self._context, (self._size, 1), generator=self._generator)
        windows = self._tokens[starts + torch.arange(self._context + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
