"""The one way tests judge passes: every stage of a recorded program gives the bits that the program gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tarry.ir import Graph, evaluate, from_raw, to_text, verify
from tarry.passes import Stages, run_pipeline
from tests.ir.raw import Recorder, same_bits


def record(program: Callable[[], Any]) -> Recorder:
    recorder = Recorder()
    with recorder:
        program()
    return recorder


def check_stages(recorder: Recorder, same: Callable[[torch.Tensor, torch.Tensor], bool] = same_bits) -> Stages:
    """Run all passes on what was recorded and compare the result of every stage with what the program computed."""
    stages = run_pipeline(from_raw(recorder.raw()), check=True)
    inputs, results = recorder.inputs(), recorder.results()
    for name, graph in stages.graphs.items():
        verify(graph, thorough=True)
        for k, (mine, wanted) in enumerate(zip(evaluate(graph, inputs), results, strict=True)):
            assert same(mine, wanted), f"output {k} at stage {name}: {mine} instead of {wanted} from\n{graph}"
    return stages


def body(graph: Graph) -> list[str]:
    """The operators of a graph with their arguments, without values and types."""
    return [line.strip().partition(" = ")[2].partition("  #")[0] for line in to_text(graph).splitlines()[1:-1]]


def kept_operators(graph: Graph) -> list[str]:
    """Names of the writing operators that are left."""
    return sorted({node.op for node in graph.nodes if node.kept})
