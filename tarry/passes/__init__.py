"""Passes over graphs: pure functions from a graph to a graph. See docs/ir.md."""

from tarry.passes.common_subexpressions import merge_common_subexpressions
from tarry.passes.concatenate import concatenate_pieces
from tarry.passes.dead_code import eliminate_dead_code
from tarry.passes.functionalize import functionalize, kept_operators
from tarry.passes.own_outputs import own_outputs
from tarry.passes.pipeline import DEFAULT, Pass, Pipeline, Stages, run, run_pipeline
from tarry.passes.views import recover_views

__all__ = [
    "DEFAULT",
    "Pass",
    "Pipeline",
    "Stages",
    "concatenate_pieces",
    "eliminate_dead_code",
    "functionalize",
    "kept_operators",
    "merge_common_subexpressions",
    "own_outputs",
    "recover_views",
    "run",
    "run_pipeline",
]
