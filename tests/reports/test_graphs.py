"""What is found out about a graph: memory over the step, its parts, and what is different in another."""

from __future__ import annotations

import random

import pytest

from tarry.reports.difference import SMALL, hunks, keys, likest
from tarry.reports.memory import MAX_POINTS, memory
from tarry.reports.nesting import phases, tree
from tests.reports.lines import layers, stage


def _applied(old: list[str], new: list[str]) -> list[str]:
    """`new`, made from `old` and the hunks."""
    result, at = [], 0
    for a, a_end, b, b_end in hunks(old, new):
        result += old[at:a] + new[b:b_end]
        at = a_end
    return result + old[at:]


@pytest.mark.parametrize("size", [0, 1, 30, 3 * SMALL])
def test_hunks_lead_from_one_text_to_the_other(size: int) -> None:
    rng = random.Random(size)
    for alphabet in (3, 50, 10**9):
        old = [str(rng.randrange(alphabet)) for _ in range(size)]
        new = [line if rng.random() < 0.95 else str(rng.randrange(alphabet)) for line in old if rng.random() < 0.95]
        assert _applied(old, new) == new
        assert hunks(old, old) == []


def test_a_line_more_is_one_hunk_also_in_a_large_graph() -> None:
    old = [f"line {k} of {k % 7}" for k in range(20_000)]
    new = [*old[:9_000], "new", *old[9_000:15_000], *old[15_001:]]
    assert hunks(old, new) == [(9_000, 9_000, 9_000, 9_001), (15_000, 15_001, 15_001, 15_001)]


def test_values_are_numbered_anew_in_each_graph_and_that_is_no_difference() -> None:
    one, two = stage("a", layers(2)), stage("b", layers(2))
    two["text"] = [text.replace("%1", "%7") for text in two["text"]]
    assert hunks(keys(one), keys(two)) == []


def test_a_graph_is_shown_beside_the_likest_before_it() -> None:
    a, b, c = ["mm", "add", "relu", "sum"], ["mm", "add", "relu", "mean"], ["conv", "pool"]
    assert likest([a, b, c, a, b]) == [None, 0, None, 0, 1]


# ---- memory


def test_a_buffer_lives_from_its_node_to_its_last_use() -> None:
    nodes = [("a", [0], "", "x:1"), ("b", [100], "", "x:2"), ("c", [101], "", "x:3"), ("d", [101, 102], "", "x:4")]
    found = memory(stage("g", nodes, size=10))
    assert found.bytes == [20, 30, 30, 40]  # the input, then what is alive at each node
    assert (found.peak, found.peak_at, found.inputs) == (40, 3, 10)
    assert [row["what"] for row in found.alive] == ["input f32[1]", "b", "c", "d"]


def test_views_and_updates_need_no_memory() -> None:
    nodes = [("view", [0], "", "x:1"), ("add_", [0], "", "x:2"), ("mul", [101], "", "x:3")]
    made = stage("g", nodes, size=10)
    made["views"], made["updates"] = [[100, 0]], [[101, 0]]
    assert memory(made).bytes == [10, 10, 20]


def test_an_update_of_what_is_read_later_needs_a_copy() -> None:
    made = stage("g", [("add_", [0], "", "x:1"), ("mul", [0, 100], "", "x:2")], size=10)
    made["updates"] = [[100, 0]]
    assert memory(made).bytes == [20, 30]


def test_a_result_that_replaces_an_input_takes_its_memory() -> None:
    made = stage("g", [("a", [0], "", "x:1"), ("b", [100], "", "x:2")], size=10)
    made["outputs"] = [[101, 0]]
    assert memory(made).bytes == [20, 20]


def test_a_view_keeps_the_buffer_alive() -> None:
    nodes = [("a", [0], "", "x:1"), ("view", [100], "", "x:2"), ("b", [0], "", "x:3"), ("c", [101], "", "x:4")]
    made = stage("g", nodes, size=10)
    made["views"] = [[101, 100]]
    assert memory(made).bytes == [20, 20, 30, 30]


def test_a_large_graph_is_thinned_and_keeps_its_peak() -> None:
    nodes = [("a", [0] if k != 15_001 else [100 + j for j in range(15_001)], "", "x:1") for k in range(20_000)]
    found = memory(stage("g", nodes, size=10))
    assert len(found.positions) <= MAX_POINTS
    assert max(found.bytes) == found.peak == 10 * 15_003


def test_an_empty_graph_has_no_peak() -> None:
    assert memory(stage("g", [])).peak == 4


# ---- parts


def test_phases_are_told_by_lines_that_come_again() -> None:
    found = phases(stage("g", layers(3)))
    runs = [word for k, word in enumerate(found) if k == 0 or found[k - 1] != word]
    assert runs == ["forward", "loss", "backward", "update"]
    assert found.count("forward") == found.count("backward") == 9


def test_without_a_backward_pass_there_are_no_phases() -> None:
    forward = layers(3)[:9]
    assert set(phases(stage("g", [*forward, forward[-1]]))) == {""}


def test_layers_that_are_alike_are_folded() -> None:
    made = tree(stage("g", layers(12)))
    names = {part.name: part for part in made.parts if part.alike}
    assert {name: part.alike for name, part in names.items()} == {"0-11": 12}
    assert sum(part.alike == 12 for part in made.parts) == 2  # forward, and backward
    assert [made.parts[part.parent].name for part in made.parts if part.alike] == ["model.blocks"] * 2  # joined
    for k, part in enumerate(made.parts):
        assert all(made.parts[child].parent == k for child in part.children)


def test_a_layer_that_is_not_like_the_others_stands_alone() -> None:
    nodes = layers(6)
    nodes[3 * 3] = ("aten::another", *nodes[3 * 3][1:])
    forward = [part for part in tree(stage("g", nodes)).parts if part.alike]
    assert sorted(part.name for part in forward) == ["0-2", "0-5", "4-5"]


def test_each_node_is_in_one_part() -> None:
    nodes = layers(5)
    made = tree(stage("g", nodes))
    assert sorted(node for part in made.parts for node in part.nodes) == list(range(len(nodes)))
    assert all(node in made.parts[part].nodes for node, part in enumerate(made.part_of))


def test_nodes_outside_of_modules_are_in_a_part_of_their_line() -> None:
    made = tree(stage("g", [("a", [0], "", "/home/me/train.py:7"), ("b", [100], "", "/home/me/train.py:7")]))
    assert [part.name for part in made.parts] == ["", "train.py:7"]
