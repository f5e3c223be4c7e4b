"""The nodes of a graph as a tree: forward, loss, backward, update; modules; and layers that are alike as one.

The tree is what the picture of a graph shows: a part that is closed is one box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ROOT = 0
AFTER_LAST = 0.1
"""Up to what part of a forward pass may come behind the last line that is met for the first time."""


@dataclass
class Part:
    """A part of a graph: a phase, a module, or a run of modules that are alike (`alike` has their number)."""

    name: str
    parent: int
    alike: int = 0
    children: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    """Those that are in no child."""


@dataclass
class Tree:
    """Parts in an order in which parents come first; and for each node the part that it is in."""

    parts: list[Part]
    part_of: list[int]


def tree(stage: Mapping[str, Any]) -> Tree:
    """The parts of a stage (`format.OWN["stage"]`)."""
    made = Tree([Part("", -1)], [])
    known: dict[tuple[str, ...], int] = {(): ROOT}
    for node, path in enumerate(_paths(stage)):
        for depth in range(1, len(path) + 1):
            if path[:depth] not in known:
                parent = known[path[: depth - 1]]
                known[path[:depth]] = len(made.parts)
                made.parts[parent].children.append(len(made.parts))
                made.parts.append(Part(path[depth - 1], parent))
        made.parts[known[path]].nodes.append(node)
        made.part_of.append(known[path])
    _fold(made, _signatures(made, stage))
    _join(made)
    return made


def _paths(stage: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """For each node the names of the parts that it is in, from the outside: a phase, then modules, or else its line."""
    modules = [tuple(path.split(".")) for path in stage["modules"]]
    lines = [(place.rpartition("/")[2],) for place in stage["sites"]]
    for phase, module, site in zip(phases(stage), stage["module"], stage["site"], strict=True):
        inner = modules[module] if module >= 0 else lines[site] if site >= 0 else ("no line",)
        yield (phase, *inner) if phase else inner


def phases(stage: Mapping[str, Any]) -> list[str]:
    """For each node "forward", "loss", "backward" or "update"; "" if the graph has no backward pass.

    A node of a backward pass has the line and the module of the forward node that it belongs to. So the forward pass is
    over about where the last line of a module was met for the first time, or where the loss begins, which is in no
    module. Nodes in modules behind that are the backward pass; what comes behind it, in no module, updates parameters.
    Lines of modules that come again without being a backward pass are few: one that meets less than a third of them is
    none.
    """
    keys = list(zip(stage["site"], stage["module"], strict=True))
    first = {key: k for k, key in reversed(list(enumerate(keys)))}
    turn = max((k for key, k in first.items() if key[1] >= 0), default=-1)
    while turn + 1 < len(keys) and turn >= 0 and keys[turn + 1] == keys[turn]:
        turn += 1
    loss = next((k for k in range(turn + 1, len(keys)) if keys[k][1] < 0), len(keys))
    if loss - turn <= turn * AFTER_LAST:
        turn = loss - 1
    behind = [k for k in range(turn + 1, len(keys)) if keys[k][1] >= 0]
    met = len({keys[k] for k in behind})
    known = sum(key[1] >= 0 for key in first)
    if not behind or met * 3 < known:
        return [""] * len(keys)
    begin, end = behind[0], behind[-1]
    words = ((turn, "forward"), (begin - 1, "loss"), (end, "backward"))
    return [next((word for last, word in words if k <= last), "update") for k in range(len(keys))]


def _signatures(made: Tree, stage: Mapping[str, Any]) -> list[int]:
    """A number for each part that parts of the same operators in the same order, with results of the same sizes, have
    in common."""
    numbers: dict[Any, int] = {}
    result = [0] * len(made.parts)
    for index in range(len(made.parts) - 1, -1, -1):  # children have higher indices
        part = made.parts[index]
        nodes = tuple((stage["op"][k], tuple(size for _, size in stage["results"][k])) for k in part.nodes)
        children = tuple((made.parts[child].name, result[child]) for child in part.children)
        result[index] = numbers.setdefault((nodes, children), len(numbers))
    return result


def _fold(made: Tree, signatures: list[int]) -> None:
    """Put runs of numbered siblings that are alike (`blocks.0`, `blocks.1`, ...) into a part of their own."""
    for index in range(len(made.parts)):
        part = made.parts[index]
        children: list[int] = []
        for run in _runs(made, part.children, signatures):
            if len(run) == 1:
                children += run
                continue
            names = [int(made.parts[child].name) for child in run]
            fold = Part(f"{min(names)}-{max(names)}", index, len(run), run)
            children.append(len(made.parts))
            for child in run:
                made.parts[child].parent = len(made.parts)
            made.parts.append(fold)
        part.children = children


def _join(made: Tree) -> None:
    """Make one part of a module and the only thing in it: `model.blocks` instead of a box in a box."""
    for index, part in enumerate(made.parts):
        if part.parent in (-1, ROOT):
            continue
        while len(part.children) == 1 and not part.nodes and not part.alike and not made.parts[part.children[0]].alike:
            child = made.parts[part.children[0]]
            part.name, part.nodes, part.children = f"{part.name}.{child.name}", child.nodes, child.children
            child.parent, child.nodes, child.children = -1, [], []
            for node in part.nodes:
                made.part_of[node] = index
            for grandchild in part.children:
                made.parts[grandchild].parent = index


def _runs(made: Tree, children: list[int], signatures: list[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for child in children:
        if run and _follows(made, run[-1], child) and signatures[run[-1]] == signatures[child]:
            run.append(child)
            continue
        if run:
            yield run
        run = [child]
    if run:
        yield run


def _follows(made: Tree, one: int, other: int) -> bool:
    """Whether two parts are neighbours in a list; a backward pass visits it from the end."""
    names = made.parts[one].name, made.parts[other].name
    return all(name.isdecimal() for name in names) and abs(int(names[0]) - int(names[1])) == 1
