"""Calls that cannot be replayed are recorded, every time, with a reason."""

from __future__ import annotations

import io
import itertools
import queue
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tarry
from tests.replay.training import batches, mlp, trainer
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


class Kept:
    """Something that outlives calls."""

    value: Any = None
    count = 0


KEPT = Kept()
HOST = torch.zeros(3)
BUFFER: Any = None


def reads(x: Tensor) -> Tensor:
    if x.sum().item() > 1e9:
        return x
    return x * 2


def reads_after(x: Tensor) -> float:
    return (x * 2).sum().item()


def prints(x: Tensor) -> Tensor:
    str(x * 2)
    return x * 3


def draws_on_the_host(x: Tensor) -> Tensor:
    return x + torch.randn(3).to("tarry")


def decides_by_chance(x: Tensor) -> Tensor:
    return x * 2 if torch.rand(()) < 2 else x


def decides_by_python_chance(x: Tensor) -> Tensor:
    return x * 2 if random.random() < 2 else x


def decides_by_numpy(x: Tensor) -> Tensor:
    return x * 2 if np.random.rand() < 2 else x


def makes_on_the_host(x: Tensor) -> Tensor:
    return x + (HOST + 1).to("tarry")


def copies_a_host_tensor_over_a_literal(x: Tensor) -> Tensor:
    made = torch.tensor([0.0, 0.0, 0.0], device="tarry")
    made.copy_(HOST + 1)
    return x + made


def makes_another_each_time(x: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 2.0, time.perf_counter() % 1], device="tarry")  # which no guard can see


def reads_the_host(x: Tensor) -> Tensor:
    return x * 2 if bool(HOST.sum() == 0) else x


def reads_the_host_as_a_number(x: Tensor) -> Tensor:
    return torch.add(x, x, alpha=HOST[0])


def changes_the_host(x: Tensor) -> Tensor:
    HOST.add_(0)
    return x * 2


def copies_into_an_existing_tensor(x: Tensor) -> Tensor:
    BUFFER.copy_(HOST)
    return x + BUFFER


def counts(x: Tensor) -> Tensor:
    KEPT.count += 1
    return x * 2


RANDOM = random.Random(0)
NUMPY_RANDOM = np.random.default_rng(0)
NUMBERS = itertools.cycle([2.0])
QUEUE: queue.Queue[float] = queue.Queue()
LINES = io.StringIO("2\n" * 100)


def _numbers() -> Iterator[float]:
    while True:
        yield 2.0


GENERATED = _numbers()


def decides_by_a_generators_chance(x: Tensor) -> Tensor:
    return x * 2 if RANDOM.random() < 2 else x


def decides_by_numpys_generator(x: Tensor) -> Tensor:
    return x * 2 if NUMPY_RANDOM.random() < 2 else x


def takes_the_next(x: Tensor) -> Tensor:
    return x * next(NUMBERS)


def takes_from_a_generator(x: Tensor) -> Tensor:
    for number in GENERATED:
        return x * number
    return x


def takes_from_a_queue(x: Tensor) -> Tensor:
    QUEUE.put(2.0)
    return x * QUEUE.get()


def reads_a_file(x: Tensor) -> Tensor:
    return x * float(LINES.readline())


def uses_the_time(x: Tensor) -> Tensor:
    return x * time.perf_counter()  # which no guard can see


def keeps_a_tensor(x: Tensor) -> Tensor:
    KEPT.__setattr__("value", x * 2)  # which no guard can see
    return x * 3


def adds_a_closure(x: Tensor) -> Tensor:
    tarry.add_step_closure(lambda total: None, x.sum())
    return x * 2


def cuts(x: Tensor) -> Tensor:
    y = x * 2
    tarry.mark_step()
    return y * 3


def runs_eagerly(x: Tensor) -> Tensor:
    return torch.nonzero(x)


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.rand(3, device="tarry")


GENERATOR: torch.Generator | None = None


def draws_from_another_generator(x: Tensor) -> Tensor:
    return x + torch.rand(3, device="tarry", generator=GENERATOR)


WEIGHT: Any = None


def returns_a_graph(x: Tensor) -> Tensor:
    return (x * WEIGHT).sin().sum()


def retains_its_graph(x: Tensor) -> Tensor:
    loss = (x * WEIGHT).sin().sum()
    loss.backward(retain_graph=True)
    return loss


def differentiates_twice(x: Tensor) -> Tensor:
    (x * WEIGHT).sin().sum().backward(create_graph=True)
    return x * 2


def returns_a_host_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, torch.zeros(2)


def returns_an_upload(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, HOST.to("tarry")


def returns_something_new(x: Tensor) -> tuple[Tensor, object]:
    return x * 2, object()


def records_nothing(x: Tensor) -> Tensor:
    return x.detach()


CASES: dict[Callable[..., Any], str] = {
    reads: "reads a value at .*test_refusals.py",
    reads_after: "reads a value at .*test_refusals.py",
    prints: "reads a value at .*test_refusals.py",
    draws_on_the_host: "draws random numbers on the host|made inside the function",
    decides_by_chance: "reads a host tensor at .*test_refusals.py",
    decides_by_python_chance: "draws random numbers on the host",
    decides_by_numpy: "draws random numbers on the host",
    makes_on_the_host: "a host tensor at .*test_refusals.py:.* that was made inside",
    copies_a_host_tensor_over_a_literal: "a host tensor at .*test_refusals.py:.* that was made inside",
    makes_another_each_time: "reads another tensor at",
    reads_the_host: "reads a host tensor at .*test_refusals.py",
    reads_the_host_as_a_number: "reads a host tensor at .*test_refusals.py",
    changes_the_host: "changes HOST, a tensor on the host",
    copies_into_an_existing_tensor: "copies a host tensor into an existing one at .*test_refusals.py",
    counts: "changes its surroundings: KEPT.count",
    decides_by_a_generators_chance: "draws random numbers from RANDOM",
    decides_by_numpys_generator: "draws random numbers from NUMPY_RANDOM",
    takes_the_next: "can take from NUMBERS, a cycle",
    takes_from_a_generator: "can take from GENERATED, a generator",
    takes_from_a_queue: "can take from QUEUE, a Queue",
    reads_a_file: "can take from LINES, a StringIO",
    uses_the_time: "'other' of aten::mul.* at .*test_refusals.py.* was",
    keeps_a_tensor: "changes its surroundings: KEPT.value is another object",
    adds_a_closure: "adds a step closure",
    cuts: "computed in 2 parts",
    runs_eagerly: "reads a value at .*test_refusals.py",
    seeds: "seeds the generator|draws random numbers",
    draws_from_another_generator: "draws random numbers from GENERATOR",
    returns_a_graph: r"Return it detached: .detach\(\)",
    retains_its_graph: r"Return it detached: .detach\(\)",
    differentiates_twice: "grad",
    returns_a_host_tensor: "returns a tensor on the host",
    returns_an_upload: "has not computed",
    returns_something_new: "could only return the same again",
    records_nothing: "records nothing",
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_reason(function: Callable[..., Any]) -> None:
    global BUFFER, GENERATOR, WEIGHT
    BUFFER = torch.zeros(3, device="tarry")
    GENERATOR = torch.Generator("tarry")
    WEIGHT = torch.ones(3, device="tarry", requires_grad=True)
    KEPT.value, KEPT.count = None, 0
    step = tarry.compile(function, verify=0)
    for _ in range(4):
        step(torch.ones(3, device="tarry"))
    assert step.replays == 0
    import re

    assert re.search(CASES[function], step.explain()), step.explain()


def test_an_argument_with_a_graph() -> None:
    weight = torch.ones(3, device="tarry", requires_grad=True)
    step = tarry.compile(lambda x: x * 2, verify=0)
    for _ in range(4):
        result = step(weight * 1)
        result.sum().backward()
    assert step.replays == 0
    assert "argument 0 has a grad_fn" in step.explain()
    assert weight.grad.tolist() == [8.0, 8.0, 8.0]


class Counting(torch.optim.AdamW):
    """One of the user's own: what it does with its count is unknown."""


def test_a_step_count_on_the_host_asks_for_capturable() -> None:
    watched = trainer("tarry", mlp, lambda model: Counting(model.parameters()))
    eager = trainer("cpu", mlp, lambda model: Counting(model.parameters()))
    step = tarry.compile(watched.step, verify=0)
    for x, y in batches(6):
        torch.testing.assert_close(step(x.to("tarry"), y.to("tarry")).cpu(), eager.step(x, y), rtol=1e-4, atol=1e-5)
    assert step.replays == 0
    assert "capturable=True" in step.explain()
    assert watched.optimizer.param_groups[0]["capturable"] is False


def test_a_rate_on_the_host_is_read_as_a_number() -> None:
    watched, eager = (
        trainer(device, mlp, lambda model: torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)))
        for device in ("tarry", "cpu")
    )
    step = tarry.compile(watched.step, verify=0)
    for k, (x, y) in enumerate(batches(8)):
        for t in (eager, watched):
            t.optimizer.param_groups[0]["lr"].fill_(0.1 if k < 5 else 0.01)
        torch.testing.assert_close(step(x.to("tarry"), y.to("tarry")).cpu(), eager.step(x, y), rtol=1e-4, atol=1e-5)
    assert "reads a host tensor" in step.explain()


def test_a_number_that_comes_as_a_host_argument() -> None:
    step = tarry.compile(lambda x, rate: torch.add(x, x, alpha=rate), verify=0)
    for rate in (1.0, 1.0, 1.0, 2.0):
        assert step(torch.ones(1, device="tarry"), torch.tensor(rate)).item() == 1 + rate
    assert step.replays == 0
    assert "reads a host tensor" in step.explain()


def test_a_scheduler_inside_the_function() -> None:
    watched = trainer("tarry")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(watched.optimizer, 0.5)

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = watched.step(x, y)
        scheduler.step()
        return loss

    step = tarry.compile(function, verify=0)
    for x, y in batches(4, device="tarry"):
        step(x, y)
    assert step.replays == 0
    assert "changes its surroundings" in step.explain()


def test_what_is_never_replayed_is_looked_at_more_and_more_rarely() -> None:
    step = tarry.compile(reads, verify=0)
    for _ in range(10):
        step(torch.ones(3, device="tarry"))
    assert "are recorded without looking" in step.explain()


def test_a_module_that_keeps_its_activations() -> None:
    class Keeping(nn.Module):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return F.relu(self.last)

    model = Keeping()
    step = tarry.compile(lambda x: model(x), verify=0)
    for _ in range(4):
        x = torch.ones(2, device="tarry")
        step(x)
        assert model.last is not None
        assert model.last.tolist() == [2.0, 2.0]
    assert step.replays == 0
