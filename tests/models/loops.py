"""Training loops that are not forward, backward, step: two optimizers, copies of weights, control flow by values.

What makes a lazy device go wrong is seldom the model and often the loop around it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.program import Builder, Optimizers, Program, adamw, sgd
from tests.models.supervised import BATCH, classes, classify, numbers, use


def _regress(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def _pairs(inputs: int, outputs: int) -> Any:
    return lambda s: (numbers(s, BATCH, inputs), numbers(s + 31, BATCH, outputs))


def _mlp(inputs: int, outputs: int, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def gan() -> Program:
    """Two networks, two optimizers, both stepped in one training step."""
    model = nn.ModuleDict({"maker": _mlp(4, 8), "judge": _mlp(8, 1)})

    def step(program: Program, model: nn.Module, optimizers: Optimizers, batch: Any) -> Tensor:
        assert isinstance(model, nn.ModuleDict)
        noise, real = batch
        maker, judge = model["maker"], model["judge"]
        optimizers[1].zero_grad()
        fake = maker(noise)
        on_real, on_fake = judge(real), judge(fake.detach())
        judged = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
        judged = judged + F.binary_cross_entropy_with_logits(on_fake, torch.zeros_like(on_fake))
        judged.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        again = judge(fake)
        made = F.binary_cross_entropy_with_logits(again, torch.ones_like(again))
        made.backward()
        optimizers[0].step()
        return (judged + made).detach()

    def optimizers(model: nn.Module) -> Optimizers:
        assert isinstance(model, nn.ModuleDict)
        return [adamw(model["maker"].parameters()), sgd(model["judge"].parameters())]

    return Program(model, _pairs(4, 8), _regress, optimizers, step)


def item_loop() -> Program:
    """Reads the loss several times inside the step and branches on it."""

    def step(program: Program, model: nn.Module, optimizers: Optimizers, batch: Any) -> Tensor:
        best = float("inf")
        for _ in range(4):
            optimizers[0].zero_grad()
            loss = program.loss(model, batch)
            value = loss.item()
            if value >= best:
                break
            best = value
            (loss * 2 if value > 0.5 else loss).backward()
            optimizers[0].step()
        return loss.detach()

    return Program(_mlp(6, 3), _pairs(6, 3), _regress, use(sgd), step)


def batchnorm_item() -> Program:
    """A value read between BatchNorm's update and the rest: the running statistics must move once."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def step(program: Program, model: nn.Module, optimizers: Optimizers, batch: Any) -> Tensor:
        assert isinstance(model, nn.Sequential)
        x, y = batch
        optimizers[0].zero_grad()
        hidden = model[1](model[0](x))
        scale = 1.0 if hidden.abs().mean().item() > 0 else 0.0
        loss = F.cross_entropy(model[3](model[2](hidden)) * scale, y)
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    return Program(model, lambda s: (numbers(s, BATCH, 6), classes(s, 4, BATCH)), classify, use(sgd), step)


def accumulation() -> Program:
    """Gradients of four micro-batches summed before one step."""

    def step(program: Program, model: nn.Module, optimizers: Optimizers, batch: Any) -> Tensor:
        optimizers[0].zero_grad(set_to_none=False)
        total = torch.zeros((), device=batch[0].device)
        for x, y in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
            loss = program.loss(model, (x, y)) / 4
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizers[0].step()
        return total

    return Program(_mlp(6, 3), _pairs(6, 3), _regress, use(adamw), step)


def ema() -> Program:
    """An averaged copy of the weights, moved towards them in place after each step."""
    online = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = nn.ModuleDict({"online": online, "average": copy.deepcopy(online)})

    def step(program: Program, model: nn.Module, optimizers: Optimizers, batch: Any) -> Tensor:
        assert isinstance(model, nn.ModuleDict)
        optimizers[0].zero_grad()
        loss = program.loss(model["online"], batch)
        loss.backward()
        optimizers[0].step()
        with torch.no_grad():
            for slow, fast in zip(model["average"].parameters(), model["online"].parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            for slow, fast in zip(model["average"].buffers(), model["online"].buffers(), strict=True):
                slow.copy_(fast)
        return loss.detach()

    def optimizers(model: nn.Module) -> Optimizers:
        assert isinstance(model, nn.ModuleDict)
        return [sgd(model["online"].parameters())]

    return Program(model, _pairs(6, 3), _regress, optimizers, step)


def gradient_penalty() -> Program:
    """The gradient with respect to the input is part of the loss: a second backward through the first."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * (slope.norm(2, dim=1) - 1).pow(2).mean()

    return Program(_mlp(6, 3), _pairs(6, 3), loss, use(adamw))


def deep_q() -> Program:
    """A target network synchronised every second step, gathered values and a Huber loss."""
    model = nn.ModuleDict({"q": _mlp(4, 3), "target": _mlp(4, 3)})
    model["target"].load_state_dict(model["q"].state_dict())
    steps = 0

    def step(program: Program, model: nn.Module, optimizers: Optimizers, batch: Any) -> Tensor:
        nonlocal steps
        assert isinstance(model, nn.ModuleDict)
        state, action, reward, following, done = batch
        with torch.no_grad():
            best = model["target"](following).max(dim=1).values
            goal = reward + 0.9 * best * (~done)
        chosen = model["q"](state).gather(1, action[:, None]).squeeze(1)
        loss = F.huber_loss(chosen, goal)
        optimizers[0].zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model["q"].parameters(), 0.1)
        optimizers[0].step()
        steps += 1
        if steps % 2 == 0:
            model["target"].load_state_dict(model["q"].state_dict())
        return loss.detach()

    def batch(s: int) -> tuple[Tensor, ...]:
        return (
            numbers(s, BATCH, 4),
            classes(s, 3, BATCH),
            numbers(s + 1, BATCH),
            numbers(s + 2, BATCH, 4),
            classes(s, 2, BATCH).bool(),
        )

    def optimizers(model: nn.Module) -> Optimizers:
        assert isinstance(model, nn.ModuleDict)
        return [adamw(model["q"].parameters())]

    return Program(model, batch, _regress, optimizers, step)


class Flow(nn.Module):
    """A fixed-step Runge-Kutta integration of a learned field."""

    def __init__(self) -> None:
        super().__init__()
        self.field = _mlp(5, 4)

    def slope(self, t: float, y: Tensor) -> Tensor:
        out: Tensor = self.field(torch.cat([y, torch.full_like(y[:, :1], t)], dim=1))
        return out

    def forward(self, y: Tensor) -> Tensor:
        h = 0.1
        for i in range(8):
            t = i * h
            a = self.slope(t, y)
            b = self.slope(t + h / 2, y + h / 2 * a)
            c = self.slope(t + h / 2, y + h / 2 * b)
            d = self.slope(t + h, y + h * c)
            y = y + h / 6 * (a + 2 * b + 2 * c + d)
        return y


def neural_ode() -> Program:
    return Program(Flow(), _pairs(4, 4), _regress, use(adamw))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def checkpointed(*, reentrant: bool) -> Builder:
    return lambda: Program(Checkpointed(reentrant=reentrant), _pairs(8, 8), _regress)


def scheduled() -> Program:
    """The learning rate changes every step, and so do the bias corrections of the optimizer."""

    def step(program: Program, model: nn.Module, optimizers: Optimizers, batch: Any) -> Tensor:
        optimizer = optimizers[0]
        if not hasattr(program, "schedule"):
            program.schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
        optimizer.zero_grad()
        loss = program.loss(model, batch)
        loss.backward()
        optimizer.step()
        program.schedule.step()
        return loss.detach()

    return Program(_mlp(6, 3), _pairs(6, 3), _regress, use(adamw), step)


def lbfgs() -> Program:
    """An optimizer that calls the closure several times and reads values to decide when to stop."""

    def step(program: Program, model: nn.Module, optimizers: Optimizers, batch: Any) -> Tensor:
        def closure() -> Tensor:
            optimizers[0].zero_grad()
            loss = program.loss(model, batch)
            loss.backward()
            return loss

        loss: Tensor = optimizers[0].step(closure)
        return loss.detach()

    return Program(
        _mlp(3, 2, 6), _pairs(3, 2), _regress, lambda m: [torch.optim.LBFGS(m.parameters(), max_iter=4)], step
    )


def contrastive() -> Program:
    """Two passes through one network, similarity of everything with everything, a learned temperature."""
    model = nn.ModuleDict({"net": _mlp(8, 6)})
    model.register_parameter("temperature", nn.Parameter(torch.tensor(0.5)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, nn.ModuleDict)
        x, y = batch
        a, b = F.normalize(model["net"](x), dim=-1), F.normalize(model["net"](y), dim=-1)
        logits = a @ b.T * model.temperature.exp()
        labels = torch.arange(x.shape[0], device=x.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return Program(model, _pairs(8, 8), loss)


def functional_meta() -> Program:
    """An inner gradient step through torch.func inside the outer loss."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        weights = dict(model.named_parameters())

        def inner(parameters: dict[str, Tensor]) -> Tensor:
            return F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

        slopes = torch.func.grad(inner)(weights)
        moved = {name: value - 0.1 * slopes[name] for name, value in weights.items()}
        return inner(moved)

    return Program(_mlp(4, 2), _pairs(4, 2), loss)


def logging_list() -> Program:
    """Keeps detached intermediate tensors alive over steps and reads them only later."""
    kept: list[Tensor] = []

    def step(program: Program, model: nn.Module, optimizers: Optimizers, batch: Any) -> Tensor:
        optimizers[0].zero_grad()
        out = model(batch[0])
        kept.append(out.detach().mean())
        loss = F.mse_loss(out, batch[1])
        loss.backward()
        kept.append(next(model.parameters()).grad.norm())
        optimizers[0].step()
        return loss.detach() + sum(float(t) for t in kept)

    return Program(_mlp(6, 3), _pairs(6, 3), _regress, use(adamw), step)


ZOO: dict[str, Builder] = {
    "gan": gan,
    "item-loop": item_loop,
    "batchnorm-item": batchnorm_item,
    "gradient-accumulation": accumulation,
    "ema": ema,
    "gradient-penalty": gradient_penalty,
    "deep-q": deep_q,
    "neural-ode": neural_ode,
    "checkpoint-reentrant": checkpointed(reentrant=True),
    "checkpoint": checkpointed(reentrant=False),
    "lr-schedule": scheduled,
    "lbfgs": lbfgs,
    "contrastive": contrastive,
    "inner-gradient": functional_meta,
    "logging-list": logging_list,
}
