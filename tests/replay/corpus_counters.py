"""Ways to count calls: each makes a function that gives how often it was called."""

from __future__ import annotations

import contextvars
import ctypes
import io
import itertools
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import torch

Counter = Callable[[], Callable[[], int]]
COUNTERS: dict[str, Counter] = {}


def counter(made: Counter) -> Counter:
    COUNTERS[made.__name__] = made
    return made


@counter
def attribute() -> Callable[[], int]:
    state = types.SimpleNamespace(count=0)

    def advance() -> int:
        state.count += 1
        return state.count

    return advance


@counter
def cell() -> Callable[[], int]:
    count = 0

    def advance() -> int:
        nonlocal count
        count += 1
        return count

    return advance


@counter
def items() -> Callable[[], int]:
    state = {"count": 0}

    def advance() -> int:
        state["count"] += 1
        return state["count"]

    return advance


@counter
def default() -> Callable[[], int]:
    def advance(state: list[int] = [0]) -> int:  # noqa: B006
        state[0] += 1
        return state[0]

    return advance


@counter
def class_attribute() -> Callable[[], int]:
    class State:
        count = 0

    def advance() -> int:
        State.count += 1
        return State.count

    return advance


@counter
def function_attribute() -> Callable[[], int]:
    def advance() -> int:
        advance.count += 1  # type: ignore[attr-defined]
        return advance.count  # type: ignore[attr-defined,no-any-return]

    advance.count = 0  # type: ignore[attr-defined]
    return advance


@counter
def module_global() -> Callable[[], int]:
    package = types.ModuleType("package")
    exec("count = 0\ndef advance():\n    global count\n    count += 1\n    return count", package.__dict__)
    return lambda: package.advance()  # type: ignore[no-any-return]


@counter
def growing_list() -> Callable[[], int]:
    state: list[int] = []
    return lambda: (state.append(0), len(state))[1]  # type: ignore[func-returns-value]


@counter
def rotating() -> Callable[[], int]:
    state = deque(range(1, 211))
    return lambda: (state.rotate(-1), state[-1])[1]  # type: ignore[func-returns-value]


@counter
def iterator() -> Callable[[], int]:
    state = itertools.count(1)
    return lambda: next(state)


@counter
def cycle() -> Callable[[], int]:
    state = itertools.cycle(range(1, 211))
    return lambda: next(state)


@counter
def generator() -> Callable[[], int]:
    state = (k for k in range(1, 10**6))
    return lambda: next(state)


@counter
def buffer() -> Callable[[], int]:
    state = io.BytesIO(bytes(range(1, 250)))
    return lambda: state.read(1)[0]


@counter
def array() -> Callable[[], int]:
    state = numpy.zeros(1, dtype=int)

    def advance() -> int:
        state[0] += 1
        return int(state[0])

    return advance


@counter
def number_of_c() -> Callable[[], int]:
    state = ctypes.c_int(0)

    def advance() -> int:
        state.value += 1
        return state.value

    return advance


@counter
def local() -> Callable[[], int]:
    state = threading.local()

    def advance() -> int:
        state.count = getattr(state, "count", 0) + 1
        return state.count  # type: ignore[no-any-return]

    return advance


@counter
def context() -> Callable[[], int]:
    state = contextvars.ContextVar("count", default=0)

    def advance() -> int:
        state.set(state.get() + 1)
        return state.get()

    return advance


@counter
def weak() -> Callable[[], int]:
    class State:
        count = 0

    kept = State()
    state = weakref.ref(kept)

    def advance() -> int:
        found: Any = state()
        found.count += 1
        return found.count + 0 * len([kept])  # type: ignore[no-any-return]

    return advance


@counter
def host_tensor() -> Callable[[], int]:
    state = torch.zeros((), dtype=torch.long)
    return lambda: int(state.add_(1))


@counter
def random_state() -> Callable[[], int]:
    state = random.Random(0)
    return lambda: state.randrange(1000)
