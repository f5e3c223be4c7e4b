"""Make a concatenation of a buffer that is written piece by piece, all of it.

DDP and FSDP fill buffers like that, to reduce or gather many tensors at once. As a chain of scatters, each piece is a
pass over the whole buffer; and a compiler that fuses them asks for each element which of the pieces it lies in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from tarry.ir.graph import Graph, GraphBuilder, Node, Value, producers
from tarry.ir.layout import TensorType
from tarry.passes.dead_code import eliminate_dead_code
from tarry.passes.emit import Emitter

SCATTER, SLICE = "aten::slice_scatter", "aten::slice.Tensor"


class Piece(NamedTuple):
    start: int  # in elements of the buffer
    source: Value


def concatenate_pieces(graph: Graph) -> Graph:
    """The graph, which has no dead code, with `cat` in place of scatters that write all of a contiguous buffer, or all
    that is read of it, each element once."""
    whole = _whole_buffers(graph)
    if not whole:
        return graph
    builder = GraphBuilder(graph)
    emit = Emitter(builder)
    for node in graph.nodes:
        if id(node) in whole:
            emit.like = node
            (result,) = node.results
            builder.replace(result, _joined(emit, whole[id(node)], result.type))
        else:
            emit.note(node, builder.copy(node), builder.resolve(node.args))
    return eliminate_dead_code(builder.finish())


def _joined(emit: Emitter, pieces: list[Piece], type_: TensorType) -> Value:
    parts = []
    for piece in pieces:
        part: Value = emit.builder.resolve(piece.source)
        part = part if part.type.is_contiguous else emit.contiguous(part)
        parts.append(part if part.type.rank == 1 else emit.view(part, "aten::view", (part.type.numel,)))
    joined = emit.call("aten::cat", tuple(parts), 0)
    same = joined.type.sizes == type_.sizes
    return emit.retype(joined if same else emit.view(joined, "aten::view", type_.sizes), type_)


def _whole_buffers(graph: Graph) -> dict[int, list[Piece]]:
    """The nodes that complete a buffer, or read a part of one, by their identity; with the pieces of that, in order."""
    made_by = producers(graph)
    uses = Counter([*graph.outputs, *(value for node in graph.nodes for value in node.operands)])
    seen: set[int] = set()
    whole = {}
    for last in reversed(graph.nodes):
        window = _window(last)
        if window is None or id(last) in seen:
            continue
        nodes = _chain(last, made_by, uses)
        pieces = _pieces([node for node in nodes if node.op == SCATTER], *window)
        if len(pieces) > 1:
            whole[id(last)] = pieces
        if last.op == SCATTER or pieces:
            seen.update(map(id, nodes))
    return whole


def _window(node: Node) -> tuple[int, int] | None:
    """From where to where a node gives what a buffer holds, in elements; None if it does something else."""
    args: Any = node.args
    if node.op == SCATTER:
        return 0, node.results[0].type.numel
    if node.op != SLICE or args[1] != 0 or args[4] != 1 or not args[0].type.is_contiguous or not args[0].type.numel:
        return None
    rows = args[0].type.sizes[0]
    row = args[0].type.numel // rows
    return _position(args[2], rows, 0) * row, _position(args[3], rows, rows) * row


def _position(index: int | None, rows: int, default: int) -> int:
    """The row that an end of a slice means: PyTorch counts negative ones from the end, and stops at either end."""
    if index is None:
        return default
    return min(max(index + rows if index < 0 else index, 0), rows)


def _chain(last: Node, made_by: Mapping[Value, Node], uses: Mapping[Value, int]) -> list[Node]:
    """The nodes that fill the buffer of the last one, from there to the first; nothing else sees what they give."""
    nodes = [last]
    base = last.operands[0] if last.op == SLICE else _base(last)
    while base is not None and uses[base] == 1 and base in made_by:
        node = made_by[base]
        base = _base(node)
        if base is not None:
            nodes.append(node)
    return nodes


def _base(node: Node) -> Value | None:
    """The contiguous buffer that a node hands on: with some rows written, or in other sizes."""
    args: Any = node.args
    rows = node.op == SCATTER and args[2] == 0 and args[5] == 1 and args[1].type.dtype == args[0].type.dtype
    if not rows and node.op != "aten::view":
        return None
    base, result = args[0], node.results[0]
    both_contiguous = base.type.is_contiguous and result.type.is_contiguous
    return base if both_contiguous and base.type.dtype == result.type.dtype and base.type.numel else None


def _pieces(scatters: list[Node], start: int, end: int) -> list[Piece]:
    """What is written between two elements of a buffer, in order; nothing, unless it is all that lies there, once."""
    pieces = []
    for node in scatters:
        args: Any = node.args
        base = _base(node)
        if base is None:
            return []
        rows = base.type.sizes[0]
        at = _position(args[3], rows, 0) * (base.type.numel // rows)
        if at < end and at + args[1].type.numel > start:
            pieces.append(Piece(at, args[1]))
    pieces.sort(key=lambda piece: piece.start)
    for piece in pieces:
        if piece.start != start:
            return []
        start += piece.source.type.numel
    return pieces if start == end else []
