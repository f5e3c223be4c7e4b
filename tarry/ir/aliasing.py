"""Which values are windows on the buffer of another value.

Values are pure, so sharing a buffer is invisible within a graph. It matters at its edge, where an output becomes the
content of a storage that nothing else may share, and for operators that count from the start of a buffer.
"""

from __future__ import annotations

from tarry.ir.graph import Graph, Value
from tarry.ir.layout import VIEW_RULES, Layout, view_layout
from tarry.ir.operators import STRIDED_VIEW, view_of

Window = tuple[Value, Layout]
"""The value that owns the buffer, and the layout through which it is seen."""


def windows(graph: Graph) -> dict[Value, Window]:
    """For every value its owner and its layout there. A value that is no view owns its buffer."""
    found: dict[Value, Window] = {value: (value, value.type.at()) for value in graph.inputs}
    for node in graph.nodes:
        for value in node.results:
            found[value] = (value, value.type.at())
        if node.op == STRIDED_VIEW or node.op in VIEW_RULES:
            base, (value,) = node.args[0], node.results
            assert isinstance(base, Value)
            owner, layout = found[base]
            if node.op == STRIDED_VIEW:
                window = view_of(node.args)
                scale = layout.offset * layout.dtype.itemsize // window.dtype.itemsize
                found[value] = (owner, Layout(window.dtype, window.sizes, window.strides, window.offset + scale))
            else:
                seen = view_layout(node.op, layout, node.args[1:])
                if seen is not None:
                    found[value] = (owner, seen)
    return found


def unowned_outputs(graph: Graph) -> list[int]:
    """Positions of the outputs that cannot become a storage's content as they are: an input again, a second window on
    the buffer of an earlier output, or a window on a part of a buffer only."""
    seen: set[Value] = set(graph.inputs)
    table = windows(graph)
    bad = []
    for k, value in enumerate(graph.outputs):
        owner, layout = table[value]
        mine, whole = value.type, owner.type
        covers = layout.offset == 0 and mine.nbytes == whole.nbytes and mine.is_dense == whole.is_dense
        if owner in seen or not covers:
            bad.append(k)
        else:
            seen.add(owner)
    return bad
