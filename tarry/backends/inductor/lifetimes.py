"""Settings for Inductor under which a step keeps no buffer longer than it is needed.

Three habits of Inductor's make a step's peak higher than eager's:

- A buffer that is dead is not freed if a later one has its size: it is kept for that one, however far away. Whether
  that raises the peak is estimated, but Inductor does not know that tarry frees the activations that a first part hands
  to a second one. Freed memory is at hand for the next buffer in any case (`tarry.config.kept_memory`), so nothing is
  gained by it.
- An update in place comes after all that reads the old contents. Inductor states that as *weak* uses: results of those
  readers count as used by the update, though nothing looks at them. Such a result is freed in time, but what reads it
  last may not write its own result over it. A step of training updates all parameters, and nearly all of a backward
  pass reads one.
- Convolutions on a CPU are given copies of their inputs in channels-last order. In training the input is kept as well,
  the backward pass has a copy of its own, which is made when the input is, and none of it is any faster.

Private names used, checked on torch 2.13: the setting `_post_fusion_custom_pass`, `SchedulerBuffer.users`,
`NodeUser.is_weak`, `WeakDep.is_fake`. Where one is missing, weak uses stay: still right, with more memory in use.
"""

from __future__ import annotations

from typing import Any

import torch

from tarry.ir.graph import Graph


def short_lifetimes(device: str, graph: Graph) -> dict[str, Any]:
    """Settings of `torch._inductor.config` for a graph, those that this version has. On a CPU: elsewhere, what they do
    was not measured."""
    if torch.device(device).type != "cpu":
        return {}
    from torch._inductor import config

    chosen: dict[str, Any] = {"allow_buffer_reuse": False, "_post_fusion_custom_pass": without_weak_users}
    if _trains_convolutions(graph):
        chosen["layout_optimization"] = False
    return {name: value for name, value in chosen.items() if hasattr(config, name)}


def _trains_convolutions(graph: Graph) -> bool:
    """Whether there is a convolution's backward pass, or what it will read is returned."""
    if any(node.op == "aten::convolution_backward" for node in graph.nodes):
        return True
    convolved = {node.operands[0] for node in graph.nodes if node.op == "aten::convolution"}
    return not convolved.isdisjoint(graph.outputs)


def without_weak_users(nodes: list[Any]) -> list[Any]:
    """A pass over Inductor's scheduled nodes. Their order is kept by dependencies, which stay."""
    from torch._inductor.dependencies import WeakDep

    def is_order(user: Any, name: str) -> bool:
        if not getattr(user, "is_weak", False):
            return False
        read = [dep for dep in user.node.read_writes.reads if dep.name == name]
        return bool(read) and all(isinstance(dep, WeakDep) and getattr(dep, "is_fake", False) for dep in read)

    for node in nodes:
        for buffer in node.get_outputs():
            buffer.users = [user for user in buffer.users if not is_order(user, buffer.get_name())]
    return nodes
