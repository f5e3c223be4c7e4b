"""Random programs on two devices of a process against the same on the CPU: copies both ways, views, writes, cuts.

    PYTHONPATH=docs/examples/chip python -m tests.fuzz.two_devices FIRST COUNT

Every third program changes the backend in the middle; then as many run on three threads at a time.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from chip import Card

import tarry
from tests.backends.simple import Walking
from tests.backends.simulated import Accelerator, Asynchronous, Updating

Placed = tuple[torch.Tensor, int]


class Pair(Walking):
    """Two devices of a kind."""

    def __init__(self, kind: type[Walking]) -> None:
        super().__init__()
        self.both = [kind(), kind()]

    def devices(self) -> list[Any]:
        return self.both

    def setup(self) -> None:
        for one in self.both:
            one.setup()

    def teardown(self) -> None:
        for one in self.both:
            one.teardown()


KINDS: list[Callable[[], Any]] = [
    Card,
    lambda: Pair(Accelerator),
    lambda: Pair(Updating),
    lambda: Pair(Asynchronous),
    lambda: Pair(Walking),
    lambda: Card(chips=1),  # the real device of both
    lambda: "torchscript",
    lambda: "eager",
]


def run(rng: random.Random, on_device: bool, change: Callable[[], None] = lambda: None) -> list[Any]:
    """All that a random program reads. On the CPU, a tensor of the "other device" is a copy."""

    def to(placed: Placed, there: int) -> Placed:
        tensor, here = placed
        if here == there:
            return placed
        return (tensor.to(f"tarry:{there}") if on_device else tensor.clone()), there

    def first(k: int) -> Placed:
        return torch.arange(6.0).view(2, 3).to(f"tarry:{k % 2}" if on_device else "cpu") * (k + 1), k % 2

    x = [first(k) for k in range(4)]
    seen: list[Any] = []
    for _ in range(40):
        i, j, there = rng.randrange(4), rng.randrange(4), rng.randrange(2)
        (a, here), (b, _) = x[i], x[j]
        match rng.randrange(13):
            case 0:
                x[i] = to(x[i], there)
            case 1:
                x[i] = (a + to(x[j], here)[0]) * 0.5, here
            case 2:
                a.add_(1)
            case 3:
                a[0].mul_(0.5)
            case 4:
                a.copy_(b)
            case 5:
                a[1].copy_(b[0])
            case 6:
                x[i] = b.clone(), x[j][1]
            case 7:
                seen.append(a.sum().item())
            case 8:
                tarry.mark_step()
            case 9:
                x[i] = to((b.t().contiguous().t(), x[j][1]), there)
            case 10:
                x[i] = to((torch.cat([a, to(x[j], here)[0]])[1:3], here), there)
            case 11:
                moved, k = to(x[i], there)
                x[i] = moved.sub_(0.25), k
            case 12:
                change()
    return seen + [tensor.cpu().tolist() for tensor, _ in x]


def check(seed: int, change: Callable[[], None] = lambda: None) -> None:
    wanted, made = run(random.Random(seed), False), run(random.Random(seed), True, change)
    assert made == wanted, (seed, made, wanted)


def main(start: int, count: int) -> None:
    tarry.set_backend(Card())
    torch.ones(1, device="tarry:1")  # there are two devices from now on
    for seed in range(start, start + count):
        tarry.set_backend(KINDS[seed % len(KINDS)]())
        flips = random.Random(seed)

        def change(flips: random.Random = flips) -> None:
            if flips.random() < 0.3:
                tarry.set_backend(flips.choice(KINDS)())

        check(seed, change if seed % 3 == 0 else lambda: None)
    for kind in KINDS:
        tarry.set_backend(kind())
        errors: list[BaseException] = []

        def work(seeds: range, errors: list[BaseException] = errors) -> None:
            try:
                for seed in seeds:
                    check(seed)
            except BaseException as error:
                errors.append(error)

        each = count // len(KINDS) // 3 + 1
        threads = [
            threading.Thread(target=work, args=(range(start + k * each, start + (k + 1) * each),)) for k in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, (kind, errors)
    print(f"{count} programs agree")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
