"""A backend whose programs can leave the process, and that can be told to be slow, to fail, or to die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tarry
from tarry.backends.base import Backend, Capabilities, Computation, Policy, Run
from tarry.errors import Unsupported
from tarry.ir.evaluate import evaluate
from tarry.ir.graph import Graph
from tarry.ir.sizes import Symbols, at
from tarry.ir.text import parse, to_text


class Portable(Backend):
    """Evaluates graphs; an artifact is the graph as text. `diary` is a file that gets a line for each compile.

    `manner`: "", "slow" (compiles until it is killed), "fails", "gives up", "dies" (its process is killed), "dies
    once", "no artifact", "cannot be stored".
    """

    name = "portable"

    def __init__(
        self, device: str = "cpu", *, diary: Path | None = None, manner: str = "", recipe: bool = True
    ) -> None:
        super().__init__(device)
        self.diary = diary
        self.manner = manner
        self.has_recipe = recipe

    def compile(self, graph: Graph) -> Computation:
        if self.diary is not None:
            with open(self.diary, "a") as file:
                file.write(f"{os.getpid()}\n")
        if self.manner == "slow":
            time.sleep(600)
        if self.manner == "fails":
            raise RuntimeError("the compiler is broken")
        if self.manner == "gives up":
            raise Unsupported(graph.nodes[0], "it is too hard")
        if self.manner == "dies" or (self.manner == "dies once" and len(self.compilers()) == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        text = to_text(graph).encode()

        def artifact() -> bytes:
            if self.manner == "cannot be stored":
                raise RuntimeError("it has a handle in it")
            return text

        return Computation(_evaluation(graph), graph, artifact=None if self.manner == "no artifact" else artifact)

    def load(self, graph: Graph, data: bytes) -> Computation:
        return Computation(_evaluation(parse(data.decode())), graph, artifact=lambda: data)

    def recipe(self) -> Any:
        return {"diary": str(self.diary or ""), "manner": self.manner} if self.has_recipe else None

    @classmethod
    def from_recipe(cls, recipe: Any) -> Portable:
        return cls(diary=Path(recipe["diary"]) if recipe["diary"] else None, manner=recipe["manner"])

    def compilers(self) -> list[int]:
        """The processes that have compiled, once for each time."""
        if self.diary is None or not self.diary.exists():
            return []
        return [int(line) for line in self.diary.read_text().split()]


def _evaluation(graph: Graph) -> Run:
    return lambda inputs, numbers: evaluate(graph, inputs, numbers)


class SizedPortable(Portable):
    """Takes steps whose sizes vary, too. Such a program is right up to twice the size that it was compiled at: the
    limit is part of the artifact."""

    name = "sized portable"
    capabilities = Capabilities(symbolic_sizes=True)

    def compile_symbolic(self, graph: Graph, symbols: Symbols) -> Computation:
        self.compile(graph)  # notes it, in its manner
        return self.load(graph, f"{2 * symbols[0]}\n{to_text(graph)}".encode())

    def load(self, graph: Graph, data: bytes) -> Computation:
        first, _, text = data.decode().partition("\n")
        if not first.isdigit():
            return super().load(graph, data)
        limit, whole = int(first), parse(text)
        count = len(whole.numbers)

        def run(inputs: list[Any], numbers: list[Any]) -> Sequence[Any]:
            assert numbers[count] <= limit
            return evaluate(at(whole, numbers[count:]), inputs, numbers[:count])

        return Computation(run, graph, artifact=lambda: data, accepts=lambda symbols: symbols[0] <= limit)


@contextmanager
def using(backend: Backend, compile: Policy | None = None) -> Iterator[Backend]:  # noqa: A002
    tarry.set_backend(backend, compile=compile)
    try:
        yield backend
    finally:
        tarry.set_backend("eager")
