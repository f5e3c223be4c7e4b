"""Make a concatenation of a buffer that is written piece by piece, all of it.

DDP and FSDP fill buffers like that, to reduce or gather many tensors at once. As a chain of scatters, each piece is a
pass over the whole buffer; and a compiler that fuses them asks for each element which of the pieces it lies in.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from tarry.ir.graph import Graph, GraphBuilder, Node, Value, producers
from tarry.ir.layout import TensorType
from tarry.passes.emit import Emitter

SCATTER = "aten::slice_scatter"


class Piece(NamedTuple):
    start: int  # in elements of the buffer
    source: Value


class Chain(NamedTuple):
    """Nodes that write all of a buffer, each element once."""

    pieces: list[Piece]  # in the order of the buffer
    nodes: set[int]  # by identity


def concatenate_pieces(graph: Graph) -> Graph:
    """The graph, which has no dead code, with `cat` in place of scatters that write all of a contiguous buffer, each
    element once."""
    chains = _chains(graph)
    if not chains:
        return graph
    replaced = {node for chain in chains.values() for node in chain.nodes}
    builder = GraphBuilder(graph)
    emit = Emitter(builder)
    for node in graph.nodes:
        if id(node) in chains:
            emit.like = node
            (result,) = node.results
            builder.replace(result, _joined(emit, chains[id(node)].pieces, result.type))
        elif id(node) not in replaced:
            emit.note(node, builder.copy(node), builder.resolve(node.args))
    return builder.finish()


def _joined(emit: Emitter, pieces: list[Piece], type_: TensorType) -> Value:
    parts = []
    for piece in pieces:
        part: Value = emit.builder.resolve(piece.source)
        part = part if part.type.is_contiguous else emit.contiguous(part)
        parts.append(part if part.type.rank == 1 else emit.view(part, "aten::view", (part.type.numel,)))
    joined = emit.call("aten::cat", tuple(parts), 0)
    same = joined.type.sizes == type_.sizes
    return emit.retype(joined if same else emit.view(joined, "aten::view", type_.sizes), type_)


def _chains(graph: Graph) -> dict[int, Chain]:
    """By the identity of the scatter that is the last one."""
    made_by = producers(graph)
    uses = Counter([*graph.outputs, *(value for node in graph.nodes for value in node.operands)])
    seen: set[int] = set()
    chains = {}
    for last in reversed(graph.nodes):
        if last.op != SCATTER or id(last) in seen:
            continue
        chain = Chain([], set())
        node: Node | None = last
        while node is not None and (base := _base(node)) is not None:
            chain.nodes.add(id(node))
            if node.op == SCATTER:
                args: Any = node.args
                chain.pieces.append(Piece(args[3] * (base.type.numel // base.type.sizes[0]), args[1]))
            node = made_by.get(base) if uses[base] == 1 else None
        seen |= chain.nodes
        chain.pieces.sort(key=lambda piece: piece.start)
        if len(chain.pieces) > 1 and _cover(chain.pieces, last.results[0].type.numel):
            chains[id(last)] = chain
    return chains


def _base(node: Node) -> Value | None:
    """The contiguous buffer that a node hands on: with some rows written, or in other sizes."""
    args: Any = node.args
    rows = node.op == SCATTER and args[2] == 0 and args[5] == 1
    if not rows and node.op != "aten::view":
        return None
    base, result = args[0], node.results[0]
    both_contiguous = base.type.is_contiguous and result.type.is_contiguous
    return base if both_contiguous and base.type.dtype == result.type.dtype and base.type.numel else None


def _cover(pieces: list[Piece], numel: int) -> bool:
    """Whether pieces follow on each other, from the first element to the last."""
    end = 0
    for start, source in pieces:
        if start != end:
            return False
        end += source.type.numel
    return end == numel
