"""Trains a small GPT on a text, letter by letter: an ordinary PyTorch script, where the device is an argument.

    python train_gpt.py --device cpu
    python train_gpt.py --device tarry
    python train_gpt.py --device tarry --checkpoint run.pt --resume

It has what a real training script has: tied embeddings, dropout, AdamW with groups for weight decay, a learning rate
that warms up and then follows a cosine, gradient accumulation and clipping, bf16 autocast, activation checkpointing, a
DataLoader with workers, validation, and checkpoints from which a run goes on exactly where it stopped.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Sampler

TEXT = Path(__file__).with_name("the_harbour_clock.txt")


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run. Each field is an option of the command line."""

    device: str = "cpu"
    steps: int = 200
    batch: int = 8  # sequences in a batch
    accumulate: int = 2  # batches in a step
    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 64
    dropout: float = 0.1
    lr: float = 3e-3
    warm_up: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    amp: bool = True
    recompute: bool = True
    compile: bool = False  # torch.compile, for comparison; tarry needs none
    workers: int = 2
    validate_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "layers", "heads", "width", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it has to be 1 or more")
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} cannot be divided among {self.heads} heads")
        if self.context < 4:
            raise ValueError(f"context is {self.context}: it has to be 4 or more")


# ---- the model


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; the defaults train on one core in seconds."""

    vocabulary: int
    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 64
    dropout: float = 0.0
    recompute: bool = False  # activation checkpointing: a layer's activations are computed again for its backward pass


class Block(nn.Module):
    """One transformer layer: causal self-attention, then a two-layer perceptron, each on a residual path."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        dropout = self.dropout if self.training else 0.0
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(mixed, dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), dropout)


class GPT(nn.Module):
    """A decoder-only transformer whose output layer shares its weight with the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.recompute = config.recompute
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
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            if self.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


# ---- the data


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every stretch of a text that is one letter longer than the context: the input, and what comes next."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return len(self.tokens) - self.context

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[start : start + self.context + 1]
        return window[:-1], window[1:]


class EndlessShuffle(Sampler[int]):
    """All indices in a random order, and again in another, and so on. A run that is resumed starts in the middle."""

    def __init__(self, size: int, seed: int, start: int) -> None:
        self.size = size
        self.seed = seed
        self.start = start

    def __iter__(self) -> Iterator[int]:
        epoch, skip = divmod(self.start, self.size)
        while True:
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + epoch))
            yield from order[skip:].tolist()
            epoch, skip = epoch + 1, 0


def encode(text: str) -> tuple[Tensor, list[str]]:
    """The text as numbers, and the letters that they stand for."""
    letters = sorted(set(text))
    number = {letter: index for index, letter in enumerate(letters)}
    return torch.tensor([number[letter] for letter in text]), letters


def loaders(settings: Settings, tokens: Tensor, done: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The training batches that come after `done` samples, and the validation batches: the last tenth of the text."""
    split = len(tokens) * 9 // 10
    train, held_out = Windows(tokens[:split], settings.context), Windows(tokens[split:], settings.context)
    quarter = range(0, len(tokens) - split - settings.context, settings.context // 4)
    if len(quarter) < settings.batch:
        raise ValueError(
            f"a tenth of the text, which has {len(tokens)} letters, is no batch of {settings.batch} sequences of "
            f"{settings.context}: take a longer text, or a smaller batch or context"
        )
    order = EndlessShuffle(len(train), settings.seed, done)
    return (
        DataLoader(train, settings.batch, sampler=order, num_workers=settings.workers),
        DataLoader(held_out, settings.batch, sampler=quarter, drop_last=True),
    )


# ---- the run


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and the gains of the norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def learning_rate(step: int, warm_up: int, steps: int) -> float:
    """Up in a straight line, then down to a tenth along a cosine; as a part of the highest."""
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


class Run:
    """A model in training, with all that a checkpoint has to hold."""

    def __init__(self, settings: Settings, text: str) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.device = torch.device(settings.device)
        self.tokens, self.letters = encode(text)
        sizes = {field.name: getattr(settings, field.name) for field in fields(GPTConfig) if field.name != "vocabulary"}
        self.model = GPT(GPTConfig(len(self.letters), **sizes)).to(self.device)
        if settings.compile:
            self.model.compile()
        groups = parameter_groups(self.model, settings.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate(step, settings.warm_up, settings.steps)
        )
        self.step = 0

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.settings.amp):
            logits = self.model(inputs)
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        """One step of the optimizer; the mean loss of its batches, still on the device."""
        total = torch.zeros((), device=self.device)
        for _ in range(self.settings.accumulate):
            loss = self.loss(*next(batches)) / self.settings.accumulate
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        return total

    @torch.no_grad()
    def validate(self, batches: DataLoader[Any]) -> float:
        self.model.eval()
        losses = [self.loss(inputs, targets).item() for inputs, targets in batches]
        self.model.train()
        return sum(losses) / len(losses)

    def save(self, path: Path) -> None:
        state = {
            "settings": asdict(self.settings),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "device_rng": None if self.device.type == "cpu" else torch.get_device_module(self.device).get_rng_state(),
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, path)

    def load(self, path: Path) -> dict[str, Any]:
        """Take everything but the state of the random numbers, which come last: see `restore_random_numbers`."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        return state

    def restore_random_numbers(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["rng"])
        if state["device_rng"] is not None and torch.device(state["settings"]["device"]).type == self.device.type:
            torch.get_device_module(self.device).set_rng_state(state["device_rng"])


Log = Callable[[int, float, float | None], None]  # step, training loss, validation loss


def train(
    settings: Settings, log: Log, *, text: str = "", stop: int = 0, save: Path | None = None, resume: Path | None = None
) -> Run:
    """Train for `settings.steps` steps, or up to step `stop`; begin with the checkpoint `resume`, end with `save`."""
    run = Run(settings, text or TEXT.read_text())
    state = None if resume is None else run.load(resume)
    training, validation = loaders(settings, run.tokens, run.step * settings.batch * settings.accumulate)
    batches = iter(training)
    if state is not None:
        run.restore_random_numbers(state)  # making the loader has drawn a number
    while run.step < (stop or settings.steps):
        loss = run.train_step(batches).item()
        due = run.step % settings.validate_every == 0
        log(run.step, loss, run.validate(validation) if due else None)
    if save is not None:
        run.save(save)
    return run


def main() -> None:
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Train a small GPT, letter by letter.", formatter_class=show_defaults)
    for field in fields(Settings):
        kind = argparse.BooleanOptionalAction if isinstance(field.default, bool) else None
        options: dict[str, Any] = {"action": kind} if kind else {"type": type(field.default)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, help=" ", **options)
    parser.add_argument("--checkpoint", type=Path, help="write the end of the run there")
    parser.add_argument("--resume", action="store_true", help="begin with what is in --checkpoint")
    given = vars(parser.parse_args())
    path, resume = given.pop("checkpoint"), given.pop("resume")
    if resume and path is None:
        parser.error("--resume needs --checkpoint, which says what to begin with")
    try:
        settings = Settings(**given)
    except ValueError as error:
        parser.error(str(error))
    if settings.device.startswith("tarry"):
        import tarry  # noqa: F401 - registers the device
    begin = time.perf_counter()

    def log(step: int, loss: float, validation: float | None) -> None:
        if step % 10 == 0 or validation is not None:
            seen = "" if validation is None else f"  validation {validation:.4f}"
            print(f"step {step:5}  {time.perf_counter() - begin:7.2f} s  loss {loss:.4f}{seen}", flush=True)

    train(settings, log, save=path, resume=path if resume else None)


if __name__ == "__main__":
    main()
