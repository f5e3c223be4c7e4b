"""Which outputs may be written into the buffer of the input that they replace."""

from __future__ import annotations

from dataclasses import replace

from tarry.ir.graph import Graph, Node, Value
from tarry.ir.layout import VIEW_RULES
from tarry.ir.operators import operator

# Words in the names of operators that fail on some data: an index out of range, a matrix that cannot be inverted, a
# probability above one. Operators that are not PyTorch's own, or write to their arguments, may fail for any reason.
_CHECKED = frozenset(
    "assert bernoulli bincount cholesky eig eigh embedding gather geqrf grid histc index inverse linalg lu lstsq "
    "multinomial nll normal ormqr poisson put scatter solve svd take triangular ctc binomial dirichlet".split()
)
_HARMLESS = frozenset(
    {
        # Windows whose bounds are known.
        "aten::slice_scatter",
        "aten::select_scatter",
        "aten::diagonal_scatter",
        "aten::as_strided_scatter",
        # Their index was checked by the forward operator that they belong to.
        "aten::embedding_dense_backward",
        "aten::nll_loss_backward",
        "aten::nll_loss2d_backward",
    }
)


def safe_updates(graph: Graph) -> Graph:
    """The graph whose `replaces` only keeps outputs that no failure can leave half-written.

    If a step breaks off, every tensor has to have the contents it had before. So an output may only overwrite an input
    if everything that can fail comes before it in the flow of data, in whatever order the compiler runs the rest: then
    nothing is overwritten when something fails.
    """
    if not any(index is not None for index in graph.replaces):
        return graph
    fallible = [node for node in graph.nodes if _may_fail(node)]
    if not fallible:
        return graph
    numbered = {id(node): k for k, node in enumerate(fallible)}
    behind: dict[Value, int] = {value: 0 for value in graph.inputs}  # as a set of bits
    for node in graph.nodes:
        flows = 0
        for value in node.operands:
            flows |= behind[value]
        if id(node) in numbered:
            flows |= 1 << numbered[id(node)]
        for value in node.results:
            behind[value] = flows
    everything = (1 << len(fallible)) - 1
    return replace(
        graph,
        replaces=tuple(
            index if index is not None and behind[value] == everything else None
            for value, index in zip(graph.outputs, graph.replaces, strict=True)
        ),
    )


def _may_fail(node: Node) -> bool:
    if node.op in _HARMLESS or node.op in VIEW_RULES:
        return False
    namespace, _, name = node.op.partition("::")
    if namespace != "aten":
        return True
    if not _CHECKED.isdisjoint(name.partition(".")[0].split("_")):
        return True
    return operator(node.op).is_mutable and not name.startswith(("_fused_", "_native_batch_norm", "_foreach_"))
