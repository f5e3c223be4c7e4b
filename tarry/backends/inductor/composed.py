"""The pieces of a graph (passes/pieces.py) as one function, so that one CUDA graph holds all of them.

Their numbers come in a few vectors for the whole graph, of which each piece is given its part: a vector of its own
would be an upload of its own, at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tarry.backends.fx import NumberVector, Signature
from tarry.backends.inductor.artifact import ALIGNMENT
from tarry.ir.graph import Graph
from tarry.passes.pieces import Call, Pieces


class Raw(NamedTuple):
    """A program as Inductor has made it: from its inputs and its vectors of numbers to what it does not update."""

    signature: Signature
    function: Callable[[list[Any]], Sequence[Any]]


Part = tuple[int, int, int]  # which vector, from where to where


def compose(graph: Graph, pieces: Pieces, parts: Sequence[Raw]) -> Raw:
    """One program of those of the pieces."""
    updated = [raw.signature.in_place for raw in parts]
    vectors: list[NumberVector] = []
    taken = [_share(vectors, call, parts[call.graph].signature) for call in pieces.calls]
    order = sorted(range(len(vectors)), key=lambda k: vectors[k].on_host)  # as in the signature of a single program
    position_of = {k: position for position, k in enumerate(order)}
    in_place = pieces.in_place(updated)
    returned = [k for k in range(len(graph.outputs)) if k not in in_place]
    signature = Signature(graph, parts[0].signature.device, [vectors[k] for k in order], in_place)

    def function(arguments: list[Any]) -> list[Any]:
        given = arguments[len(graph.inputs) :]
        inputs = arguments[: len(graph.inputs)]
        arguments.clear()

        def run(position: int, values: list[Any]) -> Sequence[Any]:
            values += [given[position_of[k]][start:end] for k, start, end in taken[position]]
            raw = parts[pieces.calls[position].graph]
            return raw.signature.arranged(raw.function(values))

        outputs = pieces.run(inputs, updated, run)
        return [outputs[k] for k in returned]

    return Raw(signature, function)


def _share(vectors: list[NumberVector], call: Call, signature: Signature) -> list[Part]:
    """Append the numbers of a call to the vectors of the whole graph; where they are."""
    parts = []
    for vector in signature.vectors:
        alike = [k for k, v in enumerate(vectors) if (v.dtype, v.on_host) == (vector.dtype, vector.on_host)]
        if not alike:
            vectors.append(replace(vector, placeholder=None, indices=[]))
        whole = vectors[alike[0] if alike else -1]
        if not vector.on_host:  # each part begins where kernels may load several elements at once
            while len(whole.indices) * whole.dtype.itemsize % ALIGNMENT:
                whole.indices.append(whole.indices[-1])
        start = len(whole.indices)
        whole.indices += [call.numbers[k] for k in vector.indices]
        parts.append((vectors.index(whole), start, len(whole.indices)))
    return parts
