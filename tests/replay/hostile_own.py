"""Functions with a state of their own, which a replay would not advance."""

from __future__ import annotations

import itertools
import queue
import random
import tempfile
import types
from collections import deque
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

from tests.replay.hostile import Case, Make, parameters, trained
from tests.replay.hostile_places import Hidden

OWN: dict[str, Make] = {}


def own(function: Make) -> Make:
    OWN[function.__name__] = function
    return function


@own
def an_iterator(device: str) -> Case:
    numbers = itertools.cycle([1, 1, 1, 1, 5])
    return Case(lambda x: x * next(numbers))


@own
def a_generator(device: str) -> Case:
    numbers = (1 + (k % 5 == 4) for k in itertools.count())
    return Case(lambda x: x * next(numbers))


@own
def a_queue(device: str) -> Case:
    numbers: queue.Queue[int] = queue.Queue()
    for k in range(1000):
        numbers.put(1 + (k % 5 == 4))
    return Case(lambda x: x * numbers.get())


@own
def a_stream(device: str) -> Case:
    path = Path(tempfile.mkdtemp()) / "numbers"
    path.write_text("1\n1\n1\n1\n5\n" * 100)
    file = path.open()
    return Case(lambda x: x * int(file.readline()))


@own
def a_random_number(device: str) -> Case:
    generator = random.Random(0)
    return Case(lambda x: x * (2 if generator.random() < 0.8 else 3))


@own
def a_random_number_of_numpy(device: str) -> Case:
    generator = numpy.random.default_rng(0)
    return Case(lambda x: x * (2 if generator.random() < 0.8 else 3))


@own
def a_random_number_of_torch(device: str) -> Case:
    generator = torch.Generator().manual_seed(0)
    return Case(lambda x: x * (2 if torch.rand(1, generator=generator) < 0.8 else 3))


@own
def a_counter(device: str) -> Case:
    counter = types.SimpleNamespace(count=0)

    def step(x: Tensor) -> Tensor:
        counter.count += 1
        return x * (3 if counter.count % 5 == 0 else 2)

    return Case(step)


@own
def a_counter_in_a_list(device: str) -> Case:
    counter = [0]

    def step(x: Tensor) -> Tensor:
        counter[0] += 1
        return x * (3 if counter[0] % 5 == 0 else 2)

    return Case(step)


@own
def accumulation(device: str) -> Case:
    model, optimizer = trained(device)
    counter = {"count": 0}

    def step(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        counter["count"] += 1
        if counter["count"] % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Case(step, state=parameters(model))


@own
def a_scheduler(device: str) -> Case:
    model, optimizer = trained(device)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return Case(step, state=parameters(model))


@own
def losses_that_are_kept(device: str) -> Case:
    losses: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        losses.append(x.sum())
        return torch.stack(losses).sum()

    return Case(step, state=lambda: losses)


@own
def a_deque_of_results(device: str) -> Case:
    recent: deque[Tensor] = deque(maxlen=3)

    def step(x: Tensor) -> Tensor:
        recent.append(x * 2)
        return torch.stack(list(recent)).sum()

    return Case(step)


@own
def a_hidden_tensor_is_replaced(device: str) -> Case:
    hidden = Hidden(torch.zeros(3, device=device))

    def step(x: Tensor) -> Tensor:
        hidden.value = hidden.value * 0.5 + x.sum(0)
        return hidden.value * 2

    return Case(step)


@own
def hidden_tensors_change_places(device: str) -> Case:
    hidden = Hidden([torch.zeros(3, device=device), torch.ones(3, device=device)])

    def step(x: Tensor) -> Tensor:
        hidden.value.reverse()
        return x * hidden.value[0]

    return Case(step)


@own
def gradients_of_hidden_parameters(device: str) -> Case:
    torch.manual_seed(0)
    hidden = Hidden(nn.Linear(3, 2).to(device))

    def step(x: Tensor) -> Tensor:
        hidden.value.zero_grad()
        loss = hidden.value(x).pow(2).mean()
        loss.backward()
        return loss.detach()

    return Case(step, state=lambda: [p.grad for p in hidden.value.parameters()])


@own
def data_of_a_hidden_parameter(device: str) -> Case:
    others = Hidden([torch.ones(3, device=device), torch.full((3,), 2.0, device=device)])
    hidden = Hidden(nn.Parameter(torch.zeros(3, device=device)))

    def step(x: Tensor) -> Tensor:
        y = x * hidden.value.detach()
        hidden.value.data = others.value[0]
        others.value.reverse()
        return y

    return Case(step)
