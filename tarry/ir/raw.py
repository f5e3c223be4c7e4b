"""A recorded graph as plain data: what the native part gives (`Batch.raw()`, csrc/bind/bind_batch.cpp) and
`from_raw` reads.

Values are numbered: the graph's inputs first, then the outputs of each node in order. Numbers that Python code gave to
operators are in a list of their own, and arguments refer to them by index.
"""

from collections.abc import Iterable
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

import torch

from tarry.codegen.op_table import facts

Scalar: TypeAlias = bool | int | float | complex

RawLayout: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""dtype, sizes, strides, offset"""

RawEdge: TypeAlias = tuple[Literal["edge"], int, RawLayout | None]
"""A value, and the view through which the node reads or writes it; None: the value as it is."""

RawSeed: TypeAlias = tuple[Literal["seed"], int, Scalar]
"""Index and value of a number that seeds a random operator."""

RawArgument: TypeAlias = (
    RawEdge
    | RawSeed
    | tuple[Literal["number"], int, Scalar]  # index, value
    | tuple[Literal["wrapped"], int, Scalar, torch.dtype]  # where the operator takes a tensor; the dtype it has as one
    | tuple[Literal["none"]]
    | tuple[Literal["list"], list["RawArgument"]]
    | tuple[Literal["const"], Any]
)


class RawNode(TypedDict):
    op: str
    args: list[RawArgument]
    outputs: list[RawLayout | None]
    """The fresh results, then the new contents of each storage in `mutated`."""
    fresh: int
    """How many of the outputs are fresh results."""
    returned: NotRequired[tuple[bool, ...]]
    """Per result that may be a new tensor: whether there is one. Raw graphs made by hand may leave it out."""
    mutated: list[int]
    """The values that the node overwrites."""
    site: int
    file: str
    line: int
    module: NotRequired[str]
    """The torch.nn.Module in which it was recorded: model.blocks.3.attn."""
    region: int
    seed: NotRequired[RawSeed]
    """Of a random operator that takes no generator."""


class RawGraph(TypedDict):
    inputs: list[RawLayout]
    nodes: list[RawNode]
    numbers: list[Scalar]
    outputs: list[int]
    replaces: list[int]
    """Per output: the input whose buffer it may take, or -1."""


def with_integers(raw: RawGraph, integers: Iterable[int]) -> RawGraph:
    """The graph as it would have been recorded with other integers than its own: sizes, strides and offsets of all
    layouts, and integer arguments, in the order in which an outline has them (csrc/execute/outline.cpp)."""
    given = iter(integers)
    numbers = list(raw["numbers"])

    def layout(own: RawLayout | None) -> RawLayout | None:
        if own is None:
            return None
        dtype, sizes, strides, _ = own
        return dtype, tuple(next(given) for _ in sizes), tuple(next(given) for _ in strides), next(given)

    def constant(own: Any) -> Any:
        if isinstance(own, list):
            return [constant(item) for item in own]
        return next(given) if isinstance(own, int) and not isinstance(own, bool) else own

    def argument(own: Any, numbers_vary: bool) -> Any:
        match own[0]:
            case "edge":
                return "edge", own[1], layout(own[2])
            case "list":
                return "list", [argument(item, numbers_vary) for item in own[1]]
            case "const":
                return "const", constant(own[1])
            case "number" if numbers_vary:
                numbers[own[1]] = constant(own[2])
                return "number", own[1], numbers[own[1]]
        return own

    def node(own: RawNode) -> RawNode:
        numbers_vary = facts(own["op"]).shape_from_numbers
        args = [argument(arg, numbers_vary) for arg in own["args"]]  # before the outputs: that is their order
        return {**own, "args": args, "outputs": [layout(output) for output in own["outputs"]]}

    inputs: Any = [layout(input_) for input_ in raw["inputs"]]
    return {**raw, "inputs": inputs, "nodes": [node(own) for own in raw["nodes"]], "numbers": numbers}
