"""Keeps what activation checkpointing recomputes out of the forward pass.

Inductor fuses kernels that read the same data. Recomputation reads what forward has read: fused with it, it would be
done in the forward pass, and what it gives be kept until backward, which is what recomputing is to avoid. So in a graph
with recomputation, nothing from its first such node on is fused with anything before it, as if they were two graphs.

Private names used, checked on torch 2.13: `torch._inductor.choices.InductorChoices.can_fuse`, `V.set_choices_handler`,
and the field "custom" of a node's meta, which tracing hands on. Where one is missing, the graph is compiled without
this: still right, with more memory in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tarry.backends.fx.lower import AFTER_FORWARD


def is_marked(module: torch.fx.GraphModule) -> bool:
    return any(_marked(node) for node in module.graph.nodes)


@contextmanager
def kept_apart() -> Iterator[None]:
    """Within the block, Inductor fuses nothing that is marked with anything that is not."""
    from torch._inductor import choices, config
    from torch._inductor.virtualized import V

    base: Any = getattr(choices, "InductorChoices", None)
    if not hasattr(base, "can_fuse") or not hasattr(V, "set_choices_handler"):
        yield
        return

    known: dict[str, bool] = {}  # by the name of a node: the scheduler asks for many pairs of them

    def after_forward(node: Any) -> bool:
        name = node.get_name()
        if name not in known:
            known[name] = _after_forward(node)
        return known[name]

    class Choices(base):
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            if after_forward(node1) != after_forward(node2):
                return False
            return bool(base.can_fuse(scheduler, node1, node2, shared_data_score))

    # Inductor's own cache does not know of these choices; tarry's store does, since regions are part of its keys.
    with config.patch(fx_graph_cache=False), V.set_choices_handler(Choices()):
        yield


def _marked(node: torch.fx.Node) -> bool:
    return AFTER_FORWARD in (node.meta.get("custom") or {})


def _after_forward(node: Any) -> bool:
    """Whether a node of the scheduler has anything in it that is marked."""
    parts = [part.node for part in node.get_nodes() if part.node is not None]
    return any(_marked(origin) for part in parts for origin in part.get_origins())
