"""Code generation: from a backend's YAML to node classes, kernels, shape functions and registrations.

`python -m tarry.codegen --help` is the command, docs/codegen.md the guide. As a library:

    from tarry.codegen import load_backend
    backend = load_backend("my_backend.yaml")
    for node in backend.nodes:
        print(node.class_name, [a.name for a in node.operands], [a.name for a in node.attributes])

Nothing here imports torch: the operators come from torchgen, which ships with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tarry.codegen.model import Backend, LazyArgument, LazySchema, Problem
    from tarry.codegen.reading import BackendYamlError, load_backend

__all__ = ["Backend", "BackendYamlError", "LazyArgument", "LazySchema", "Problem", "load_backend"]


def __getattr__(name: str) -> Any:
    # `import tarry` comes through this package for the table of operators, and must not pay for the reader.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tarry.codegen import model, reading

    return getattr(reading, name, None) or getattr(model, name)
