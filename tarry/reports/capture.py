"""Compiled graphs as lines of the file of events: each stage of the graph, and what the backend made of it.

Graphs never change, so the runtime hands them over as they are when they are compiled; the recorder's thread makes text
of them later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tarry.ir.aliasing import windows
from tarry.ir.graph import Graph, Node, Value, leaves
from tarry.ir.operators import operator
from tarry.ir.text import node_text, type_text
from tarry.reports.format import hexadecimal

CHUNK = 100
"""Nodes that are written down between two pauses: a few milliseconds."""
MAX_NODES_IN_ALL_STAGES = 5_000
"""Of larger graphs, the stages between the first and the last are left out."""
MAX_NODES = 500_000
"""Nodes in the stages of all graphs of a run. Of what comes later, no stages are kept."""
MAX_PROGRAM = 1_000_000
"""Characters of a backend's text."""
MAX_LINE = 4_000
"""Characters of a node's text: operators on lists have thousands of operands."""


Stages = Callable[[], Mapping[str, Graph]]
Lines = Iterator[dict[str, Any] | None]
"""Lines; None where their maker can pause."""


@dataclass
class Capture:
    """Names graphs, and decides what is kept of each."""

    _names: dict[str, int] = field(default_factory=dict)
    _begun: dict[str, str] = field(default_factory=dict)
    """Graphs that are being compiled, by their keys."""
    _nodes: int = 0

    def lines(
        self, key: tuple[int, int], facts: Mapping[str, Any], stages: Stages, text: Callable[[], str] | None
    ) -> Lines:
        """The lines of a graph, made piece by piece. `facts` are fields of the first (`format.OWN["graph"]`)."""
        name = hexadecimal(key)
        title = self._begun.pop(name, "") or self._title(name)
        if facts["origin"] == "compiling":
            self._begun[name] = title
        graph = {"kind": "graph", "graph": title, "key": name, **facts}
        kept, note = self._kept(stages())
        yield None
        program = "" if text is None else text()
        if len(program) > MAX_PROGRAM:
            cut = f"the backend's text is cut after {MAX_PROGRAM:,} of {len(program):,} characters"
            note = f"{note}; {cut}" if note else cut
        yield {**graph, "note": note}
        yield from _stages(title, kept)
        if program:
            yield {"kind": "program", "graph": title, "text": program[:MAX_PROGRAM]}

    def _title(self, name: str) -> str:
        """What to call another graph of this name."""
        count = self._names[name] = self._names.get(name, 0) + 1
        return name if count == 1 else f"{name}-{count}"

    def _kept(self, stages: Mapping[str, Graph]) -> tuple[dict[str, Graph], str]:
        kept, note = dict(stages), ""
        first, last = next(iter(kept), ""), next(reversed(kept), "")
        if any(len(graph.nodes) > MAX_NODES_IN_ALL_STAGES for graph in kept.values()):
            kept = {name: graph for name, graph in kept.items() if name in (first, last)}
            note = (
                f"more than {MAX_NODES_IN_ALL_STAGES:,} nodes: the stages between '{first}' and '{last}' are left out"
            )
        size = sum(len(graph.nodes) for graph in kept.values())
        if self._nodes + size > MAX_NODES:
            return {}, f"stages are left out: those of earlier graphs have {self._nodes:,} nodes already"
        self._nodes += size
        return kept, note


def _stages(name: str, stages: Mapping[str, Graph]) -> Lines:
    last, fields = "", None
    for stage, graph in stages.items():
        columns = Stage(graph)
        for position in range(0, len(graph.nodes), CHUNK):
            columns.add(graph.nodes[position : position + CHUNK])
            yield None
        if columns.fields() == fields:
            yield {"kind": "same_stage", "graph": name, "stage": stage, "as": last}
            continue
        last, fields = stage, columns.fields()
        yield {"kind": "stage", "graph": name, "stage": stage, **fields}


class Stage:
    """The columns of a graph's nodes (`format.OWN["stage"]`)."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._owners = {value.id: owner.id for value, (owner, _) in windows(graph).items() if owner is not value}
        self._updates: list[list[int]] = []
        self._sites: dict[str, int] = {}
        self._modules: dict[str, int] = {}
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("text", "op", "operands", "results", "site", "module")
        }

    def add(self, nodes: tuple[Node, ...]) -> None:
        """Write down some more nodes."""
        columns = self._columns
        for node in nodes:
            columns["text"].append(_short(node_text(node).partition("  # ")[0]))
            columns["op"].append(node.op)
            columns["operands"].append([value.id for value in dict.fromkeys(node.operands)])
            columns["results"].append([[v.id, 0 if v.id in self._owners else int(v.type.nbytes)] for v in node.results])
            self._updates += [[new.id, old.id] for new, old in _updates(node)]
            site = node.site
            columns["site"].append(_index(self._sites, "" if site is None else f"{site.file}:{site.line}"))
            columns["module"].append(_index(self._modules, getattr(site, "module", "")))

    def fields(self) -> dict[str, Any]:
        graph = self._graph
        return {
            "inputs": [[value.id, type_text(value.type), int(value.type.nbytes)] for value in graph.inputs],
            "outputs": [
                [value.id, None if replaced is None else graph.inputs[replaced].id]
                for value, replaced in zip(graph.outputs, graph.replaces, strict=True)
            ],
            "views": [[value, owner] for value, owner in self._owners.items()],
            "updates": self._updates,
            "sites": list(self._sites),
            "modules": list(self._modules),
            **self._columns,
        }


def _updates(node: Node) -> list[tuple[Value, Value]]:
    """The values that a node makes by writing over others: after its fresh results, one for each that it writes."""
    written = [leaf for k in operator(node.op).written for leaf in leaves(node.args[k]) if isinstance(leaf, Value)]
    if not written:
        return []
    return [(new, old) for new, old in zip(node.outputs[-len(written) :], written, strict=True) if new is not None]


def _index(table: dict[str, int], name: str) -> int:
    return table.setdefault(name, len(table)) if name else -1


def _short(text: str) -> str:
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]} ... ({len(text):,} characters)"
