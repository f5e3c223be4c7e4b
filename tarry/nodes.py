"""Typed nodes of every operator that tarry records, generated from tarry/codegen/tarry.yaml for the torch at hand.

    from tarry import nodes

    match nodes.typed(node):
        case nodes.AddTensor(other=other, alpha=1):
            ...

A class is loaded when it is first asked for, with its neighbours.
"""

from __future__ import annotations

from typing import Any

from tarry import generated
from tarry.codegen.shards import shard
from tarry.ir.graph import Node
from tarry.ir.typed import TypedNode


def typed(node: Node) -> TypedNode | None:
    """The typed view of a node; None for an operator that tarry has no class for, such as a custom one."""
    module = generated.module(f"nodes_{shard(node.op)}")
    return None if module is None else module.typed(node)


def __getattr__(name: str) -> Any:
    op = None if name.startswith("__") else generated.class_names().get(name)
    module = None if op is None else generated.module(f"nodes_{shard(op)}")
    if op is None or module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return module.CLASSES[op]


def __dir__() -> list[str]:
    return sorted([*globals(), *generated.class_names()])
