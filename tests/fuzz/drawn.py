"""What topics share: choices, and lines that may be refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from tests.aliasing.world import World

T = TypeVar("T")
Topic = Callable[[World, st.DataObject], None]

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
SIZES = (0, 1, 2, 3, 5, 7, 11, 13)


class Drawn:
    """Choices, all of hypothesis's."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def int(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def pick(self, options: Sequence[T]) -> T:
        return self.data.draw(st.sampled_from(options))

    def some(self, options: Sequence[T], low: int, high: int) -> list[T]:
        return [self.pick(options) for _ in range(self.int(low, high))]


def make(world: World, source: str) -> str | None:
    """Run `name = source`; the name, if eager did not refuse it."""
    name = world.fresh()
    return name if world.run(f"{name} = {source}", (name,)) and name in world.names else None
