"""How the modules that tarry generates for itself are split. Alone in its file: every lowering asks it."""

from __future__ import annotations


def shard(op: str) -> str:
    """The part of a module's name that an operator decides ("aten::_foreach_add.List" is in f)."""
    return op.rpartition("::")[2].lstrip("_")[:1].lower() or "other"
