"""What a stored program is a program for: all that decides it, as text, and the hash of that text as its name."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tarry.ir.graph import Graph, Number, map_leaves
from tarry.ir.sizes import without_values
from tarry.ir.text import to_text

_ZEROS: dict[type, int | float | complex] = {bool: False, int: 0, float: 0.0, complex: 0j}


@dataclass(frozen=True)
class Identity:
    """`text` is compared when a program is loaded: a hash alone never runs one."""

    text: str

    @functools.cached_property
    def key(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def identify(graph: Graph, backend: str, fingerprint: str) -> Identity:
    """The identity of the program that a backend makes of a graph here."""
    return Identity("\n".join((canonical_text(graph), backend, fingerprint, _versions())))


def identify_range(graph: Graph, backend: str, fingerprint: str, number: int) -> Identity:
    """The same for a graph whose sizes vary. There may be several programs, each right for a range of sizes; the sizes
    at which the graph was written down are no part of it."""
    text = canonical_text(without_values(graph))
    return Identity("\n".join((text, f"range {number}", backend, fingerprint, _versions())))


def identify_note(subject: str, backend: str) -> Identity:
    """The identity of a note: that there is likely to be a program of this kind. It is found without a graph, and
    without looking at the machine; what it says has to be checked."""
    return Identity(f"a note\n{subject}\n{backend}")


def canonical_text(graph: Graph) -> str:
    """A graph as text without what does not decide its program: lines of the user's code, and the values of numbers
    that are inputs."""

    def plain(leaf: Any) -> Any:
        return replace(leaf, value=_ZEROS[type(leaf.value)]) if isinstance(leaf, Number) else leaf

    nodes = tuple(
        replace(node, args=map_leaves(node.args, plain), seed=plain(node.seed), site=None) for node in graph.nodes
    )
    return to_text(replace(graph, nodes=nodes, numbers=tuple(map(plain, graph.numbers))))


@functools.cache
def _versions() -> str:
    """Of all that has a hand in a program besides the backend's own choices."""
    import torch

    from tarry.native import C

    return json.dumps(
        {
            "torch": [torch.__version__, str(torch.version.git_version)],
            "python": list(sys.version_info[:3]),
            "native": Path(C.__file__).parent.name,  # it has the hash of its sources in it
            "tarry": sources_digest(),
        }
    )


@functools.cache
def sources_digest() -> str:
    """The hash of tarry's own Python files: a developer's edit makes other programs, the version may not."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    state = hashlib.sha256()
    for part in ("backends", "ir", "passes", "runtime", "store"):
        for folder, folders, files in os.walk(os.path.join(root, part)):  # in a third of the time that pathlib takes
            folders.sort()
            for name in sorted(files):
                if name.endswith(".py"):
                    state.update(f"{name}\0".encode())
                    with open(os.path.join(folder, name), "rb") as file:
                        state.update(file.read())
    return state.hexdigest()
