"""Steps that read, write, return and keep tensors, and tensors that change between calls."""

from __future__ import annotations

import itertools
import types
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.replay.corpus import CHANGE, at, step, trained, values
from tests.replay.hostile import Case

# ---- tensors


@step
def argument_version(device: str) -> Case:
    kept = torch.ones(3, device=device)
    return Case(lambda x: x * kept._version)


@step
def tensor_grows(device: str) -> Case:
    seen: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        seen.append(x.sum())
        return torch.stack(seen[-3:]).sum()

    return Case(run)


@step
def state_replaced(device: str) -> Case:
    state = types.SimpleNamespace(value=torch.zeros(3, device=device))

    def run(x: Tensor) -> Tensor:
        state.value = state.value * 0.5 + x.sum(0)
        return state.value * 2

    return Case(run)


@step
def state_in_place(device: str) -> Case:
    state = torch.zeros(3, device=device)
    return Case(lambda x: state.mul_(0.5).add_(x.sum(0)) * 2, state=lambda: [state])


@step
def argument_written(device: str) -> Case:
    return Case(lambda x: x.mul_(2).sum())


@step
def argument_view_written(device: str) -> Case:
    def run(x: Tensor) -> Tensor:
        x[1:3].add_(1)
        return x

    return Case(run)


@step
def argument_is_returned(device: str) -> Case:
    return Case(lambda x: (x, x * 2, x))


@step
def view_of_argument(device: str) -> Case:
    return Case(lambda x: x[1:].t())


@step
def view_of_state(device: str) -> Case:
    state = torch.zeros(4, 3, device=device)

    def run(x: Tensor) -> Tensor:
        state.add_(x)
        return state[1:]

    return Case(run)


@step
def state_is_returned(device: str) -> Case:
    state = torch.zeros(4, 3, device=device)
    return Case(lambda x: state.add_(x))


@step
def results_share_memory(device: str) -> Case:
    def run(x: Tensor) -> Any:
        y = x * 2
        return y, y[1:], y.view(-1)

    return Case(run)


@step
def state_resized(device: str) -> Case:
    holder = types.SimpleNamespace(value=torch.ones(3, device=device))
    other = torch.ones(5, device=device)
    return Case(lambda x: x * holder.value.sum(), before=at(CHANGE, lambda: setattr(holder, "value", other)))


@step
def state_resized_in_place(device: str) -> Case:
    state = torch.ones(6, device=device)
    return Case(lambda x: x * state.sum(), before=at(CHANGE, lambda: state.resize_(2)))


@step
def state_transposed(device: str) -> Case:
    state = torch.arange(9.0).reshape(3, 3).to(device)
    return Case(lambda x: x @ state, before=at(CHANGE, lambda: state.t_()))


@step
def state_set(device: str) -> Case:
    state, other = torch.ones(3, device=device), torch.full((3,), 5.0, device=device)
    return Case(lambda x: x * state, before=at(CHANGE, lambda: state.set_(other)))


@step
def state_written_outside(device: str) -> Case:
    state = torch.ones(3, device=device)
    return Case(lambda x: x * state, before=lambda k: state.add_(1))


@step
def host_state_written_outside(device: str) -> Case:
    state = torch.ones(3)
    return Case(lambda x: x * state.to(x.device), before=lambda k: state.add_(1) if k % 5 == 0 else None)


@step
def host_state_by_numpy(device: str) -> Case:
    state = torch.ones(3)
    array = state.numpy()
    return Case(lambda x: x * state.to(x.device), before=at(CHANGE, lambda: array.__setitem__(0, 7.0)))


@step
def numpy_state(device: str) -> Case:
    state = numpy.ones(3, dtype=numpy.float32)
    return Case(lambda x: x * torch.from_numpy(state).to(x.device), before=at(CHANGE, lambda: state.__setitem__(0, 7)))


@step
def large_numpy_state(device: str) -> Case:
    state = numpy.ones(20000, dtype=numpy.float32)
    return Case(
        lambda x: x * torch.from_numpy(state).to(x.device)[:3], before=at(CHANGE, lambda: state.__setitem__(0, 7))
    )


@step
def literals(device: str) -> Case:
    numbers = [1.0, 2.0, 3.0]
    return Case(
        lambda x: x * torch.tensor(numbers, device=x.device), before=at(CHANGE, lambda: numbers.__setitem__(1, 9.0))
    )


@step
def requires_grad_of_argument(device: str) -> Case:
    def run(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad((leaf * leaf).sum(), leaf)
        return found

    return Case(run)


@step
def gradients_accumulate(device: str) -> Case:
    model, optimizer, _ = trained(device)
    calls = itertools.count()

    def run(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss.detach()

    def before(k: int) -> None:
        next(calls)
        if k % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=k % 8 == 3)

    return Case(run, before=before, state=lambda: [p.grad for p in model.parameters() if p.grad is not None])


@step
def retained_graph(device: str) -> Case:
    def run(x: Tensor) -> Tensor:
        weight = torch.ones(3, device=x.device, requires_grad=True)
        y = (x * weight).sum()
        y.backward(retain_graph=True)
        y.backward()
        assert weight.grad is not None
        return weight.grad

    return Case(run)


@step
def a_live_graph(device: str) -> Case:
    weight = torch.ones(3, device=device, requires_grad=True)
    return Case(lambda x: x * weight)


@step
def gradients_of_gradients(device: str) -> Case:
    weight = torch.ones(3, device=device, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((x * weight.pow(3)).sum(), weight, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), weight)
        return h

    return Case(run)


@step
def batch_norm(device: str) -> Case:
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(3).to(device)
    return Case(lambda x: layer(x).detach(), before=at(20, layer.eval), state=values(layer))


@step
def batch_norm_momentum(device: str) -> Case:
    layer = nn.BatchNorm1d(3, momentum=None).to(device)
    return Case(lambda x: layer(x).detach(), state=values(layer))


@step
def average(device: str) -> Case:
    model, _, train = trained(device)
    averaged = torch.optim.swa_utils.AveragedModel(model)

    def run(x: Tensor) -> Tensor:
        loss = train(x)
        averaged.update_parameters(model)
        return loss  # type: ignore[no-any-return]

    return Case(run, state=values(averaged))


@step
def scheduler_inside(device: str) -> Case:
    model, optimizer, train = trained(device)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)

    def run(x: Tensor) -> Tensor:
        loss = train(x)
        scheduler.step()
        return loss  # type: ignore[no-any-return]

    return Case(run, state=values(model))


@step
def scheduler_outside(device: str) -> Case:
    model, optimizer, train = trained(device, torch.optim.AdamW, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return Case(train, before=lambda k: k > 3 and scheduler.step(), state=values(model))


@step
def warm_restarts(device: str) -> Case:
    model, optimizer, train = trained(device, momentum=0.9, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    return Case(train, before=lambda k: k > 3 and scheduler.step(), state=values(model))


@step
def rate_is_read(device: str) -> Case:
    model, optimizer, train = trained(device)

    def run(x: Tensor) -> Any:
        return train(x) * optimizer.param_groups[0]["lr"]

    return Case(run, before=lambda k: optimizer.param_groups[0].update(lr=0.1 / (1 + k)), state=values(model))


@step
def rate_branches(device: str) -> Case:
    model, optimizer, train = trained(device)

    def run(x: Tensor) -> Any:
        return train(x) * (2 if optimizer.param_groups[0]["lr"] < 0.006 else 1)

    return Case(run, before=lambda k: optimizer.param_groups[0].update(lr=0.1 / (1 + k)), state=values(model))


@step
def clipped(device: str) -> Case:
    model, optimizer, _ = trained(device)
    limit = types.SimpleNamespace(norm=1.0)

    def run(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = (model(x) - 5).pow(2).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit.norm)
        optimizer.step()
        return loss.detach(), norm

    return Case(run, before=at(CHANGE, lambda: setattr(limit, "norm", 0.1)), state=values(model))
