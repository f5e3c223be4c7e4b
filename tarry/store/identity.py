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
    """What a program is for, and the circumstances that decided it: its backend, the versions of all that took part."""

    subject: str
    circumstances: tuple[tuple[str, str], ...] = ()

    @functools.cached_property
    def text(self) -> str:
        """All of it. Compared when a program is loaded: a hash alone never runs one."""
        return f"{self.subject}\n{json.dumps(self.circumstances)}"

    @functools.cached_property
    def family(self) -> str:
        """What the names of all programs for the same subject begin with."""
        return hashlib.sha256(self.subject.encode()).hexdigest()[:16]

    @functools.cached_property
    def key(self) -> str:
        return f"{self.family}-{hashlib.sha256(self.text.encode()).hexdigest()}"

    def differences(self, text: str) -> list[str] | None:
        """In which circumstances another program was made, whose identity has this text, in words; None if it is for
        something else."""
        subject, _, circumstances = text.rpartition("\n")
        if subject != self.subject:
            return None
        try:
            theirs = dict(json.loads(circumstances))
        except ValueError:
            return None
        ours = dict(self.circumstances)
        return [_different(name, theirs.get(name, ""), ours[name]) for name in ours if theirs.get(name) != ours[name]]


def _different(name: str, theirs: str, ours: str) -> str:
    if len(theirs) + len(ours) < 80:
        return f"{name} {theirs or 'unknown'}, not {ours}"
    try:
        old, new = json.loads(theirs), json.loads(ours)
        changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    except (ValueError, AttributeError):
        changed = []
    return f"other {name}" + (f" ({', '.join(changed)})" if changed else "")


def identify(graph: Graph, backend: str, fingerprint: str) -> Identity:
    """The identity of the program that a backend makes of a graph here."""
    return Identity(canonical_text(graph), _circumstances(backend, fingerprint))


def identify_range(graph: Graph, backend: str, fingerprint: str, number: int) -> Identity:
    """The same for a graph whose sizes vary. There may be several programs, each right for a range of sizes; the sizes
    at which the graph was written down are no part of it."""
    text = canonical_text(without_values(graph))
    return Identity(f"{text}\nrange {number}", _circumstances(backend, fingerprint))


def identify_note(subject: str, backend: str) -> Identity:
    """The identity of a note: that there is likely to be a program of this kind. It is found without a graph, and
    without looking at the machine; what it says has to be checked."""
    return Identity(f"a note\n{subject}", (("backend", backend),))


def canonical_text(graph: Graph) -> str:
    """A graph as text without what does not decide its program: lines of the user's code, and the values of numbers
    that are inputs."""

    def plain(leaf: Any) -> Any:
        return replace(leaf, value=_ZEROS[type(leaf.value)]) if isinstance(leaf, Number) else leaf

    nodes = tuple(
        replace(node, args=map_leaves(node.args, plain), seed=plain(node.seed), site=None) for node in graph.nodes
    )
    return to_text(replace(graph, nodes=nodes, numbers=tuple(map(plain, graph.numbers))))


def _circumstances(backend: str, fingerprint: str) -> tuple[tuple[str, str], ...]:
    return ("backend", backend), ("settings of the backend", fingerprint), *_versions()


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    """Of all that has a hand in a program besides the backend's own choices."""
    import torch

    from tarry.native import C

    return (
        ("torch", f"{torch.__version__} {torch.version.git_version}"),
        ("Python", ".".join(map(str, sys.version_info[:3]))),
        ("native part of tarry", Path(C.__file__).parent.name),  # it has the hash of its sources in it
        ("sources of tarry", sources_digest()),
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
