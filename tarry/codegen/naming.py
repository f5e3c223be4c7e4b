"""Names: of classes where torchgen's rule gives several operators the same one, and of backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tarry.codegen.model import Backend, LazySchema, Variant

BUILT_IN_BACKENDS = frozenset({"eager", "inductor", "null", "torchscript", "xla"})
"""Names that no other backend may have."""


def default_name(backend: Backend) -> str:
    """The name of a backend that is given none: its dispatch key's, or its namespace's if that is taken."""
    name = backend.name.lower()
    return backend.cpp_namespace.rpartition("::")[2].lower() if name in BUILT_IN_BACKENDS else name


def with_distinct_names(nodes: Sequence[LazySchema]) -> tuple[LazySchema, ...]:
    """Nodes with class names of their own. PyTorch's generator gives `add.Tensor` and `add_.Tensor` the same one, which
    its C++ compiler then refuses; the pure operator keeps it."""
    chosen: dict[str, str] = {}
    taken: set[str] = set()
    plainest = sorted(nodes, key=lambda node: (node.variant is not Variant.FUNCTIONAL, node.name[0] == "_", node.name))
    for node in plainest:
        name = next(name for name in _candidates(node) if name not in taken)
        chosen[node.name] = name
        taken.add(name)
    return tuple(replace(node, class_name=chosen[node.name]) for node in nodes)


def _candidates(node: LazySchema) -> Iterator[str]:
    base = node.name.partition(".")[0]
    yield node.class_name
    if base.endswith("_") and not base.endswith("__"):
        yield f"{node.class_name}InPlace"
    if base.startswith("_"):
        yield f"Private{node.class_name}"
    count = 2
    while True:
        yield f"{node.class_name}{count}"
        count += 1
