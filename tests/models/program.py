"""What a model of the zoo is: a way to build it, batches, a training step and perhaps a generation.

A program is built twice from one seed, runs on CPU eager and on the device, and both runs must agree. Dropout is zero
everywhere, so that no random number decides anything after the weights are drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tests.support import counters, fallbacks, reset_device

STEPS = 3
#: The largest difference from eager that is still agreement, relative to the value where that is above one.
TOLERANCE = 1e-3

Optimizers = list[torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # A large eps: with the default one, a gradient of 1e-9 moves its weight as far as any other, and noise decides.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def plain_step(program: Program, model: nn.Module, optimizers: Optimizers, batch: Any) -> Tensor:
    """The training step that most programs have."""
    optimizers[0].zero_grad()
    loss = program.loss(model, batch)
    loss.backward()
    optimizers[0].step()
    return loss.detach()


@dataclass
class Program:
    """One model with everything needed to train it. ``batch(step)`` gives CPU tensors; the runner moves them."""

    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizers: Callable[[nn.Module], Optimizers] = field(default=lambda model: [sgd(model.parameters())])
    step: Callable[[Program, nn.Module, Optimizers, Any], Tensor] = plain_step
    generate: Callable[[nn.Module, str], Tensor] | None = None


Builder = Callable[[], Program]


@dataclass(frozen=True)
class Run:
    """What one run of a program has computed, on the host."""

    losses: list[float]
    before: dict[str, Tensor]
    state: dict[str, Tensor]
    tokens: list[Any] | None
    seconds: float


def run(build: Builder, device: str, *, seed: int = 0, steps: int = STEPS) -> Run:
    """Build from ``seed``, train on ``device``, generate if the program can, and bring all of it to the host."""
    torch.manual_seed(seed)
    program = build()
    before = {name: value.detach().clone() for name, value in program.model.state_dict().items()}
    model = program.model.to(device)
    optimizers = program.optimizers(model)
    batches = [program.batch(i) for i in range(steps)]
    start = time.perf_counter()
    losses = []
    model.train()
    for batch in batches:
        on_device = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
        losses.append(program.step(program, model, optimizers, on_device))
    host_losses = [float(loss) for loss in losses]
    tokens = None
    if program.generate is not None:
        model.eval()
        with torch.no_grad():
            tokens = program.generate(model, device).tolist()
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    return Run(host_losses, before, state, tokens, time.perf_counter() - start)


@dataclass(frozen=True)
class Comparison:
    """The device's run beside eager's."""

    loss_difference: float
    worst_parameter: str
    parameter_difference: float
    tokens_agree: bool | None
    fallbacks: dict[str, int]
    compiles: int
    seconds: float
    eager_seconds: float

    @property
    def trained(self) -> bool:
        return self.loss_difference <= TOLERANCE and self.parameter_difference <= TOLERANCE

    @property
    def ok(self) -> bool:
        return self.trained and self.tokens_agree is not False


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative where the value is above one; infinite where only one side is finite."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    a, e = actual.to(torch.complex128 if actual.is_complex() else torch.float64), expected
    e = e.to(a.dtype)
    if not torch.equal(a.isfinite(), e.isfinite()):
        return float("inf")
    a, e = a[e.isfinite()], e[e.isfinite()]
    return float(((a - e).abs() / e.abs().clamp(min=1)).max()) if a.numel() else 0.0


def _require_learning(eager: Run) -> None:
    """A program whose loss is not finite, or whose weights stay where they were, compares nothing."""
    if not all(math.isfinite(loss) for loss in eager.losses):
        raise AssertionError(f"eager's losses are not finite: {eager.losses}")
    floats = [name for name, value in eager.state.items() if value.is_floating_point()]
    moved = [name for name in floats if not torch.equal(eager.state[name], eager.before[name])]
    if len(moved) < len(floats) / 2:
        raise AssertionError(f"training changed only {len(moved)} of {len(floats)} entries of the state")


def compare(build: Builder, device: str) -> Comparison:
    """Run on CPU eager and on ``device`` and put the two side by side."""
    eager = run(build, "cpu")
    _require_learning(eager)
    reset_device(device)
    ours = run(build, device)
    seen = fallbacks(device)
    compiles = counters(device).get("compile", 0)
    if set(ours.state) != set(eager.state):
        raise AssertionError(f"state_dict keys differ: {set(ours.state) ^ set(eager.state)}")
    differences = {name: _difference(ours.state[name], value) for name, value in eager.state.items()}
    worst = max(differences, key=lambda name: differences[name]) if differences else ""
    return Comparison(
        loss_difference=_difference(torch.tensor(ours.losses), torch.tensor(eager.losses)),
        worst_parameter=worst,
        parameter_difference=differences.get(worst, 0.0),
        tokens_agree=None if eager.tokens is None else ours.tokens == eager.tokens,
        fallbacks=seen,
        compiles=compiles,
        seconds=ours.seconds,
        eager_seconds=eager.seconds,
    )
