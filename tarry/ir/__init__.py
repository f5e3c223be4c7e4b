"""The graph of a step: immutable, typed, checked, printable. See docs/ir.md."""

from tarry.codegen.op_table import OpEntry, facts
from tarry.errors import IRError
from tarry.ir.build import from_raw
from tarry.ir.evaluate import evaluate
from tarry.ir.graph import (
    HERE,
    Arg,
    Constant,
    Graph,
    GraphBuilder,
    Here,
    Node,
    Number,
    Site,
    Value,
    leaves,
    map_leaves,
    producers,
    users,
)
from tarry.ir.infer import infer
from tarry.ir.layout import Layout, TensorType
from tarry.ir.operators import TARRY_OPERATORS, Operator, operator, overload
from tarry.ir.text import node_text, parse, to_text, type_text
from tarry.ir.verify import RULES, verify

__all__ = [
    "HERE",
    "RULES",
    "TARRY_OPERATORS",
    "Arg",
    "Constant",
    "Graph",
    "GraphBuilder",
    "Here",
    "IRError",
    "Layout",
    "Node",
    "Number",
    "OpEntry",
    "Operator",
    "Site",
    "TensorType",
    "Value",
    "evaluate",
    "facts",
    "from_raw",
    "infer",
    "leaves",
    "map_leaves",
    "node_text",
    "operator",
    "overload",
    "parse",
    "producers",
    "to_text",
    "type_text",
    "users",
    "verify",
]
