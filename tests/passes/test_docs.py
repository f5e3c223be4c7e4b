"""The examples in docs/ir.md are what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tarry.ir import Graph, GraphBuilder, parse, producers, to_text
from tarry.passes import run

PAGE = (Path(__file__).parents[2] / "docs" / "ir.md").read_text()


def test_the_program_at_its_stages() -> None:
    recorded, optimized = re.findall(r"```\n(graph.*?)\n```", PAGE, re.DOTALL)
    assert to_text(run(parse(recorded), check=True)) == optimized


def test_the_example_of_a_pass() -> None:
    (source,) = re.findall(r"```python\n(def double_negation.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"Graph": Graph, "GraphBuilder": GraphBuilder, "producers": producers}
    exec(source, names)
    graph = parse("""
graph(%0: f32[4]):
  %1: f32[4] = aten::neg(%0)
  %2: f32[4] = aten::neg(%1)
  %3: f32[4] = aten::exp(%2)
  return %3
""")
    assert [node.args[0] for node in names["double_negation"](graph).nodes] == [graph.inputs[0]] * 2
