"""Keeps what activation checkpointing recomputes where it was recorded.

Inductor fuses kernels that read the same data. Recomputation reads what forward has read: fused with it, it would be
done in the forward pass, and what it gives be kept until backward, which is what recomputing is to avoid. So a graph
with recomputation has phases, of which each begins where another part is recomputed, and nothing is fused across them,
as if they were graphs of their own.

Private names used, checked on torch 2.13: `torch._inductor.choices.InductorChoices.can_fuse`, `V.set_choices_handler`,
and the field "custom" of a node's meta, which tracing hands on. Where one is missing, the graph is compiled without
this: still right, with more memory in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tarry.backends.fx.lower import PHASE


def has_phases(module: torch.fx.GraphModule) -> bool:
    """Whether there is anything in a graph that has to be kept apart."""
    return any(_phase_of(node) for node in module.graph.nodes)


@contextmanager
def kept_apart() -> Iterator[None]:
    """Within the block, Inductor fuses nothing across phases."""
    from torch._inductor import choices, config
    from torch._inductor.virtualized import V

    base: Any = getattr(choices, "InductorChoices", None)
    if not hasattr(base, "can_fuse") or not hasattr(V, "set_choices_handler"):
        yield
        return
    known: dict[str, int] = {}  # by the name of a node: the scheduler asks for many pairs of them

    def phase(node: Any) -> int:
        name = node.get_name()
        if name not in known:
            parts = [part.node for part in node.get_nodes() if part.node is not None]
            # What is computed earlier may be computed again in it, and then counts among its origins.
            known[name] = max((_phase_of(origin) for part in parts for origin in part.get_origins()), default=0)
        return known[name]

    class Choices(base):
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            if phase(node1) != phase(node2):
                return False
            return bool(base.can_fuse(scheduler, node1, node2, shared_data_score))

    # Inductor's own cache does not know of these choices; tarry's store does, since regions are part of its keys.
    with config.patch(fx_graph_cache=False), V.set_choices_handler(Choices()):
        yield


def _phase_of(node: torch.fx.Node) -> int:
    return int((node.meta.get("custom") or {}).get(PHASE, 0))
