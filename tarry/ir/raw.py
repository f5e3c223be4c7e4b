"""A recorded graph as plain data: what the native part gives (`Batch.raw()`, csrc/bind/bind_batch.cpp) and
`from_raw` reads.

Values are numbered: the graph's inputs first, then the outputs of each node in order. Numbers that Python code gave to
operators are in a list of their own, and arguments refer to them by index.
"""

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

import torch

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
