"""The order in which a step with collectives runs, and where it is cut."""

from __future__ import annotations

import pytest

import tarry  # noqa: F401 - its operators
from tarry.ir.graph import Graph
from tarry.ir.text import parse
from tarry.passes.overlap import overlapped

LARGE, SMALL = "f32[65536]", "f32[4]"


def _reduce(value: int, order: int, type_: str = LARGE) -> str:
    """Gives %(order + 1) and, as the order, %(order + 2)."""
    return _call(order + 1, type_, f"all_reduce_(%{value}, %{order}, ", '"SUM", "0"')


def _call(result: int, type_: str, begin: str, end: str) -> str:
    return f"(%{result}: {type_}, %{result + 1}: i64[1]) = tarry_c10d::{begin}$0=1.0, {end})"


def _graph(*lines: str, returns: str, type_: str = LARGE) -> Graph:
    body = "".join(f"  {line}\n" for line in lines)
    return parse(f"graph(%0: {type_}, %1: i64[1]):\n{body}  return {returns}")


def _runs(graph: Graph) -> list[str]:
    short = {"tarry_c10d::all_reduce_": "reduce", "tarry_c10d::all_gather": "gather"}
    return [
        " ".join(short.get(node.op, node.op.split("::")[1].split(".")[0]) for node in run)
        for run in overlapped(graph, {})
    ]


def _one(result: int, op: str, value: int, type_: str = LARGE) -> str:
    return f"%{result}: {type_} = aten::{op}(%{value})"


def test_what_reads_a_result_comes_after_what_does_not() -> None:
    graph = _graph(_reduce(0, 1), _one(4, "sin", 2), _one(5, "cos", 0), returns="%4, %5, %3")
    assert _runs(graph) == ["reduce", "cos", "sin"]


def test_the_next_collective_starts_before_the_first_is_waited_for() -> None:
    second = _call(6, LARGE, "all_reduce_(%5, %3, ", '"SUM", "0"')
    graph = _graph(_reduce(0, 1), _one(4, "sin", 2), _one(5, "cos", 0), second, returns="%4, %6, %7")
    assert _runs(graph) == ["reduce", "cos", "reduce", "sin"]


def test_a_chain_stays_as_it_is() -> None:
    second = _call(5, LARGE, "all_reduce_(%4, %3, ", '"SUM", "0"')
    graph = _graph(_reduce(0, 1), _one(4, "sin", 2), second, _one(7, "cos", 5), returns="%7, %6")
    assert _runs(graph) == ["reduce", "sin", "reduce", "cos"]


def test_a_small_collective_makes_no_cut_of_its_own() -> None:
    lines = (_one(4, "sin", 0, SMALL), _one(5, "cos", 4, SMALL))
    reduce = _reduce(0, 1, SMALL)
    graph = _graph(reduce, *lines, returns="%2, %5, %3", type_=SMALL)
    assert _runs(graph) == ["sin cos", "reduce"]


@pytest.mark.parametrize("layers", [1, 4])
def test_one_layer_is_gathered_ahead(layers: int) -> None:
    """As in FSDP: each layer reads its gathered parameters and the result of the layer before."""
    lines, order, last, free = [], 1, 0, 2
    for _ in range(layers):
        lines.append(_call(free, "f32[2, 65536]", f"all_gather(%0, %{order}, ", '2, "0"'))
        lines.append(f"%{free + 2}: f32[65536] = aten::select.int(%{free}, 0, 0)")
        lines.append(f"%{free + 3}: f32[65536] = aten::mul.Tensor(%{free + 2}, %{last})")
        order, last, free = free + 1, free + 3, free + 4
    graph = _graph(*lines, returns=f"%{last}, %{order}")
    ahead = ["select mul", "gather"] * (layers - 2)
    assert _runs(graph) == ([f"gather{' gather' * (layers > 1)}", *ahead, *["select mul"] * min(layers, 2)])
