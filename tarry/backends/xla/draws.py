"""Random operators: ATen draws on the real device, from the node's seed, before the program runs.

So the numbers are the ones that eager draws from that seed, which no generator of XLA's could promise. Only operators
whose draws depend on nothing but sizes and numbers can be drawn ahead; the others are left to the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tarry.ir.evaluate import run_node
from tarry.ir.graph import Node, Value

DRAWN: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(
        (
            "aten::bernoulli.p",
            "aten::cauchy",
            "aten::exponential",
            "aten::geometric",
            "aten::log_normal",
            "aten::normal.float_float",
            "aten::normal_functional",
            "aten::rand",
            "aten::rand.generator",
            "aten::rand_like",
            "aten::randint",
            "aten::randint.generator",
            "aten::randint.low",
            "aten::randint.low_generator",
            "aten::randint_like",
            "aten::randint_like.low_dtype",
            "aten::randn",
            "aten::randn.generator",
            "aten::randn_like",
            "aten::random",
            "aten::random.from",
            "aten::random.to",
            "aten::randperm",
            "aten::randperm.generator",
            "aten::uniform",
        )
    ),
    "aten::native_dropout": (1,),
}
"""Which results are drawn: all, or those at some places, from which a lowering computes the rest."""


def drawn_values(node: Node) -> tuple[Value, ...]:
    """The results of a node that ATen draws."""
    places = DRAWN[node.op]
    outputs = node.outputs if places is None else [node.outputs[k] for k in places]
    return tuple(value for value in outputs if value is not None)


@dataclass(frozen=True)
class Draw:
    """A random node, and how to draw from its seed."""

    node: Node
    device: torch.device

    def __call__(self, numbers: Sequence[Any]) -> list[torch.Tensor]:
        # Only the operands' sizes, strides and dtype count, not their contents.
        environment = {
            value: torch.empty_strided(value.type.sizes, value.type.strides, dtype=value.type.dtype, device=self.device)
            for value in self.node.operands
        }
        run_node(self.node, environment, numbers, self.device)
        return [environment[value] for value in drawn_values(self.node)]
