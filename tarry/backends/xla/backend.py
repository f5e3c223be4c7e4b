"""The backend: what it takes, and on which device. JAX is imported when a backend is made, and not before."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tarry.backends.base import Backend, Computation
from tarry.codegen.op_table import facts
from tarry.errors import BackendError
from tarry.ir.graph import Graph, Node, Number, leaves
from tarry.ir.operators import operator
from tarry.passes.foreach import unroll_foreach

_SCALES = frozenset({"alpha", "beta"})
"""Arguments that are 1 nearly always, and are left out of the program as long as they are."""


class XlaBackend(Backend):
    """Compiles each step to one XLA program, on the CPU or on the GPU that JAX was installed for."""

    name = "xla"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        try:
            import jax  # noqa: F401
        except ImportError as error:
            raise BackendError(
                "backend 'xla' needs JAX, which is not installed: pip install 'tarry[xla]' (on a GPU, also "
                "'jax[cuda12]' or 'jax[cuda13]')"
            ) from error
        from tarry.backends.xla import decompositions, draws, dtypes, program, table
        from tarry.backends.xla.data import Exchange, find_device

        self._lowerings = table.LOWERINGS
        self._drawn = draws.DRAWN
        self._dtypes = dtypes.JAX_DTYPES
        self._recipes = decompositions.recipes
        self._make_program = program.Program
        self._make_exchange = lambda: Exchange(find_device(self.device))
        self._make_exchange()  # raises if there is no such device, while the backend before this one is still there
        self._exchange: Any = None
        self._programs = 0
        self._seconds = 0.0

    def setup(self) -> None:
        self._exchange = self._make_exchange()

    def teardown(self) -> None:
        self._exchange = None

    # ---- what it takes

    def supports(self, node: Node) -> bool:
        if facts(node.op).on_lists:
            one_by_one = () if node.kept or facts(node.op).element is None else _one_by_one(node)
            return bool(one_by_one) and all(map(self.supports, one_by_one))
        if not all(value.type.dtype in self._dtypes for value in (*node.operands, *node.results)):
            return False
        lowering = self._lowerings.get(node.op)
        if lowering is None:
            return node.op in self._drawn
        return lowering.when is None or lowering.when(node)

    def decompositions(self) -> Mapping[str, Callable[..., Any]]:
        return self._recipes()

    def takes_number(self, node: Node, number: Number, varied: bool) -> bool:
        lowering = self._lowerings.get(facts(node.op).element or node.op)
        if lowering is None:
            return True
        for argument, given in zip(operator(node.op).arguments, node.args, strict=True):
            if number not in leaves(given):
                continue
            if argument.name in lowering.constant:
                return False
            if argument.name in lowering.settled or (argument.name in _SCALES and number.value == 1):
                return varied
        return True

    # ---- compiling

    def compile(self, graph: Graph) -> Computation:
        import torch

        start = time.perf_counter()
        made = self._make_program(unroll_foreach(graph), self._exchange, torch.device(self.device))
        self._programs += 1
        self._seconds += time.perf_counter() - start
        return made.computation()

    def metrics(self) -> Mapping[str, float]:
        return {"programs": self._programs, "compile_seconds": self._seconds}


def _one_by_one(node: Node) -> tuple[Node, ...]:
    """The nodes, one for each tensor, that a node on lists of tensors is taken apart into."""
    alone = Graph(tuple(dict.fromkeys(node.operands)), (), (node,), node.results, (None,) * len(node.results))
    return unroll_foreach(alone).nodes
