"""What decides a program is part of its identity, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tarry.ir.graph import Graph, Site
from tarry.ir.text import parse
from tarry.store import identify, identify_note, identify_range, identity

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


SIZED = """
graph(%0: f32[<s0 = 11>, 8]{8, 1}, %1: f32[<s0 + 1 = 12>, 8]{8, 1}):
  %2: f32[<2*s0 + 1 = 23>, 8]{8, 1} = aten::cat([%0, %1], 0)
  return %2
"""


def _range(text: str, number: int = 0) -> str:
    return identify_range(parse(text), "inductor", "cpu", number).key


def test_the_sizes_at_hand_make_no_difference_to_a_program_for_all_sizes() -> None:
    larger = SIZED.replace("= 11", "= 13").replace("= 12", "= 14").replace("= 23", "= 27")
    assert _range(larger) == _range(SIZED)
    assert _range(SIZED.replace("<s0 + 1 = 12>", "<s1 = 12>")) != _range(SIZED)
    assert len({_range(SIZED), _range(SIZED, 1), _key(SIZED)}) == 3


def test_a_note_is_no_program() -> None:
    notes = {identify_note(subject, "inductor") for subject in ("a", "b")}
    assert len(notes | {identify(parse(GRAPH), "inductor", "cpu")}) == 3


def test_backend_fingerprint_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {_key(GRAPH), _key(GRAPH, backend="other"), _key(GRAPH, fingerprint="cuda")}
    monkeypatch.setattr(identity, "_versions", lambda: (("torch", "3.0"),))
    keys.add(_key(GRAPH))
    assert len(keys) == 4


def test_versions_are_those_of_torch_python_and_our_sources() -> None:
    assert [name for name, _ in identity._versions()] == ["torch", "Python", "native part of tarry", "sources of tarry"]
