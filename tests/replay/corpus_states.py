"""Steps that count their calls, each in another kind of object, and do something else every so many calls. Steps that
draw random numbers, raise, nest or use threads."""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import random
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

import tarry
from tests.replay.corpus import CHANGE, STEPS, at, step, trained, values
from tests.replay.corpus_counters import COUNTERS
from tests.replay.hostile import Case, Make

# ---- states that a step advances itself: seen by guards, or hidden

PERIODS = (2, 3, 7, 50)


def _counting(counter: Callable[[], Callable[[], int]], period: int) -> Make:
    def make(device: str) -> Case:
        advance = counter()
        return Case(lambda x: x * 3 if advance() % period == 0 else x * 2)

    return make


STEPS |= {
    f"every_{period}_{name}": _counting(counter, period) for name, counter in COUNTERS.items() for period in PERIODS
}


# ---- random numbers


@contextlib.contextmanager
def _seeded(seed: Callable[[], object]) -> Any:
    seed()
    yield


@step
def seeded_inside(device: str) -> Case:
    def run(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x * torch.rand(3).to(x.device)

    return Case(run)


@step
def own_generator(device: str) -> Case:
    generator = torch.Generator().manual_seed(0)
    return Case(lambda x: x * torch.rand(3, generator=generator).to(x.device))


@step
def host_draws(device: str) -> Case:
    return Case(lambda x: x * torch.rand(3).to(x.device), around=lambda k: _seeded(lambda: torch.manual_seed(k)))


@step
def python_draws(device: str) -> Case:
    return Case(lambda x: x * random.random(), around=lambda k: _seeded(lambda: random.seed(k)))


@step
def python_draws_rarely(device: str) -> Case:
    generator = random.Random(1)
    return Case(lambda x: x * (3 if generator.random() < 0.1 else 2))


@step
def numpy_draws(device: str) -> Case:
    generator = numpy.random.default_rng(0)
    return Case(lambda x: x * float(generator.normal()))


@step
def numpy_global_draws(device: str) -> Case:
    return Case(lambda x: x * numpy.random.rand(), around=lambda k: _seeded(lambda: numpy.random.seed(k)))


@step
def forked_draws(device: str) -> Case:
    def run(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return x * torch.rand(3).to(x.device)

    return Case(run)


# ---- exceptions, threads, nesting, prints, time


@step
def raises_now_and_then(device: str) -> Case:
    fails = types.SimpleNamespace(value=False)

    def run(x: Tensor) -> Tensor:
        y = x * 2
        if fails.value:
            raise KeyError("mine")
        return y

    return Case(run, before=lambda k: setattr(fails, "value", k % 6 == 5))


@step
def raises_hidden(device: str) -> Case:
    fails = ctypes.c_bool(False)

    def run(x: Tensor) -> Tensor:
        if fails.value:
            raise KeyError("mine")
        return x * 2

    return Case(run, before=lambda k: setattr(fails, "value", k >= 20))


@step
def caught_inside(device: str) -> Case:
    def run(x: Tensor) -> Tensor:
        try:
            return x @ x
        except RuntimeError:
            return x * 2

    return Case(run)


@step
def nested(device: str) -> Case:
    state = types.SimpleNamespace(scale=2.0)
    inner = tarry.compile(lambda x: x * state.scale) if device == "tarry" else lambda x: x * state.scale
    return Case(lambda x: inner(x) + inner(x), before=at(CHANGE, lambda: setattr(state, "scale", 3.0)))


@step
def nested_hidden(device: str) -> Case:
    hidden = ctypes.c_double(2.0)
    inner = tarry.compile(lambda x: x * hidden.value) if device == "tarry" else lambda x: x * hidden.value
    return Case(lambda x: inner(x) + 1, before=at(CHANGE, lambda: setattr(hidden, "value", 3.0)))


@step
def recursive(device: str) -> Case:
    def run(x: Tensor, depth: int = 3) -> Tensor:
        return x if depth == 0 else run(x * 1.5, depth - 1)

    return Case(run)


@step
def in_a_thread(device: str) -> Case:
    def run(x: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(x * 2))
        thread.start()
        thread.join()
        return found[0] + 1

    return Case(run)


@step
def prints(device: str) -> Case:
    def run(x: Tensor) -> Tensor:
        print("a step", end="", file=io.StringIO())
        return x * 2

    return Case(run)


@step
def warns(device: str) -> Case:
    def run(x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("mine", stacklevel=1)
        return x * 2

    return Case(run)


@step
def by_the_clock(device: str) -> Case:
    calls = itertools.count()
    return Case(lambda x: x * (1 if time.monotonic() > 0 else 2), before=lambda k: next(calls))


@step
def reads_its_argument(device: str) -> Case:
    return Case(lambda x: x * 2 if x.sum() > 0 else x * 3)


@step
def returns_a_number(device: str) -> Case:
    return Case(lambda x: x.sum().item())


@step
def returns_a_shape(device: str) -> Case:
    return Case(lambda x: (x * 2, x.shape, x.dtype, str(x.dim())))


@step
def returns_an_object(device: str) -> Case:
    return Case(lambda x: (x * 2, [1, 2], {"a": 1.5}))


@step
def returns_nothing(device: str) -> Case:
    state = torch.zeros(3, device=device)

    def run(x: Tensor) -> None:
        state.add_(x.sum(0))

    return Case(run, state=lambda: [state])


@step
def checkpointed(device: str) -> Case:
    model, optimizer, _ = trained(device)

    def run(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).pow(2).mean()  # type: ignore[no-untyped-call]
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(run, state=values(model))


@step
def functional_call(device: str) -> Case:
    model, _, _ = trained(device)
    state = {k: v.detach() for k, v in model.state_dict().items()}

    def before(k: int) -> None:
        if k == CHANGE:
            state["0.weight"] = torch.ones(4, 3, device=device)

    return Case(lambda x: torch.func.functional_call(model, state, x).detach(), before=before)


@step
def vmapped(device: str) -> Case:
    scale = ctypes.c_double(2.0)
    return Case(
        lambda x: torch.vmap(lambda row: row * scale.value)(x), before=at(CHANGE, lambda: setattr(scale, "value", 3.0))
    )


@step
def early_stop(device: str) -> Case:
    model, _, train = trained(device)
    best = types.SimpleNamespace(loss=float("inf"))

    def run(x: Tensor) -> Tensor:
        loss = train(x)
        best.loss = min(best.loss, float(loss))
        return loss  # type: ignore[no-any-return]

    return Case(run, state=values(model))


@step
def logs(device: str) -> Case:
    _, _, train = trained(device)
    losses: list[float] = []

    def run(x: Tensor) -> Tensor:
        loss = train(x)
        losses.append(loss.item())
        return loss  # type: ignore[no-any-return]

    return Case(run, state=lambda: [torch.tensor(losses)])


@step
def frozen_while(device: str) -> Case:
    model, _, train = trained(device)
    return Case(train, before=lambda k: model[0].requires_grad_(k % 10 < 5), state=values(model))


@step
def evaluated_between(device: str) -> Case:
    model, _, train = trained(device)

    def before(k: int) -> None:
        if k % 5 == 4:
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 3, device=device))
            model.train()

    return Case(train, before=before, state=values(model))
