"""Passes over graphs: pure functions from a graph to a graph. See docs/ir.md."""

from tarry.passes.common_subexpressions import merge_common_subexpressions
from tarry.passes.concatenate import concatenate_pieces
from tarry.passes.dead_code import eliminate_dead_code
from tarry.passes.functionalize import functionalize
from tarry.passes.own_outputs import own_outputs
from tarry.passes.pipeline import DEFAULT, Pass, Stages, run, run_pipeline
from tarry.passes.views import recover_views

__all__ = [
    "DEFAULT",
    "Pass",
    "Stages",
    "concatenate_pieces",
    "eliminate_dead_code",
    "functionalize",
    "merge_common_subexpressions",
    "own_outputs",
    "recover_views",
    "run",
    "run_pipeline",
]
