"""Small backends for tests of the contract: each compiles to a walk over the graph, and keeps what it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import tarry
from tarry.backends.base import Backend, Computation, Run
from tarry.ir.evaluate import run_node
from tarry.ir.graph import Graph, Node, Number
from tarry.ir.verify import verify


class Walking(Backend):
    """Runs the nodes one by one. `refuses` are numbers that it cannot take as inputs, `lacks` operators it lacks."""

    name = "walking"

    def __init__(
        self,
        device: str = "cpu",
        *,
        lacks: Iterable[str] = (),
        only: Iterable[str] | None = None,
        refuses: Callable[[Node, Number, bool], bool] = lambda node, number, varied: False,
        table: dict[Any, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__(device)
        self.lacks = frozenset(lacks)
        self.only = None if only is None else frozenset(only)
        self.refuses = refuses
        self.table = table or {}
        self.graphs: list[Graph] = []
        self.runs = 0

    def supports(self, node: Node) -> bool:
        return node.op not in self.lacks and (self.only is None or node.op in self.only)

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        return self.table

    def takes_number(self, node: Node, number: Number, varied: bool) -> bool:
        return not self.refuses(node, number, varied)

    def compile(self, graph: Graph) -> Computation | Run:
        # A part may return a window on something of its own if there is no operator to copy it with.
        verify(graph, "optimized" if "aten::clone" not in self.lacks and self.only is None else "views")
        assert all(self.supports(node) for node in graph.nodes)
        self.graphs.append(graph)

        def run(inputs: list[Any], numbers: list[Any]) -> list[Any]:
            self.runs += 1
            return self.walk(graph, inputs, numbers)

        return run

    def walk(self, graph: Graph, inputs: list[torch.Tensor], numbers: list[Any]) -> list[torch.Tensor]:
        environment = dict(zip(graph.inputs, inputs, strict=True))
        for node in graph.nodes:
            run_node(node, environment, numbers, torch.device(self.device))
        return [environment[value] for value in graph.outputs]

    @property
    def operators(self) -> list[str]:
        """The operators of all graphs that were compiled."""
        return [node.op for graph in self.graphs for node in graph.nodes]


@contextmanager
def using(backend: Any) -> Iterator[Any]:
    """Make a backend the current one for a block."""
    before = tarry.get_backend()
    tarry.set_backend(backend)
    try:
        yield backend
    finally:
        tarry.set_backend(before)
