"""What decides a program is part of its identity, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tarry.ir.graph import Graph, Site
from tarry.ir.text import parse
from tarry.store import identify, identity

GRAPH = """
graph(%0: f32[4, 8], %1: f32[8]):
  %2: f32[4, 8] = aten::add.Tensor(%0, %1, alpha=$0=2.5)
  %3: f32[4] = aten::sum.dim_IntList(%2, [1], False)
  return %3, %2 -> %0
"""


def _key(text: str, backend: str = "inductor", fingerprint: str = "cpu") -> str:
    return identify(parse(text), backend, fingerprint).key


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("f32[4, 8], %1", "f32[4, 8]{1, 4}, %1"),
        ("%1: f32[8]", "%1: f32[1]"),
        ("%1: f32[8]", "%1: f16[8]"),
        ("[1], False", "[-1], False"),
        ("$0=2.5", "$0=2"),  # another dtype
        ("$0=2.5", "$0=wrapped(2.5)"),
        ("$0=2.5", "2.5"),
        ("%2 -> %0", "%2"),
        ("%3, %2 -> %0", "%2 -> %0, %3"),
        ("aten::add.Tensor(%0, %1", "aten::add.Tensor(%1, %0"),
    ],
)
def test_another_program(old: str, new: str) -> None:
    assert old in GRAPH
    assert _key(GRAPH.replace(old, new)) != _key(GRAPH)


def test_lines_and_values_of_numbers_make_no_difference() -> None:
    graph = parse(GRAPH)
    nodes = tuple(replace(node, site=Site("train.py", 3)) for node in graph.nodes)
    moved = Graph(graph.inputs, graph.numbers, nodes, graph.outputs, graph.replaces)
    assert identify(moved, "inductor", "cpu") == identify(graph, "inductor", "cpu")
    assert _key(GRAPH.replace("$0=2.5", "$0=-1.5")) == _key(GRAPH)


def test_backend_fingerprint_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {_key(GRAPH), _key(GRAPH, backend="other"), _key(GRAPH, fingerprint="cuda")}
    monkeypatch.setattr(identity, "_versions", lambda: "torch 3.0")
    keys.add(_key(GRAPH))
    assert len(keys) == 4


def test_versions_are_those_of_torch_python_and_our_sources() -> None:
    assert {"torch", "python", "native", "tarry"} == set(__import__("json").loads(identity._versions()))
