"""Which outputs may be written into the buffer of the input that they replace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tarry.ir.graph import Graph, Node, Value
from tarry.ir.layout import VIEW_RULES
from tarry.ir.operators import operator

# Words in the names of operators that fail on some data or some numbers: an index out of range, a matrix that cannot be
# inverted, a probability above one. Operators that are not PyTorch's own, or write to their arguments, may fail for any
# reason. tests/passes/test_donation.py has real failures to compare with.
_WORDS = """
    assert bernoulli binary bincount binomial cauchy celu cholesky ctc dirichlet eig eigh embedding exponential fake
    gather geometric geqrf grid histc index inverse linalg lstsq lu multi multilabel multinomial nll normal ormqr
    poisson put quantize quantized random renorm scatter searchsorted segment solve svd take triangular uniform
    unpool2d unpool3d
"""
_CHECKED = frozenset(_WORDS.split())
# On a CUDA device these check in the kernel: a failure is no exception, but the end of all work on the device.
_CHECKED_IN_KERNEL = frozenset({"embedding", "gather", "index", "nll", "put", "scatter", "take"})
# Of integers, these fail on some: a division by zero, a negative power.
_CHECKED_FOR_INTEGERS = frozenset({"div", "floor_divide", "fmod", "pow", "remainder"})
_INTEGERS = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
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
        "aten::_embedding_bag_dense_backward",
        "aten::_embedding_bag_per_sample_weights_backward",
        "aten::nll_loss_backward",
        "aten::nll_loss2d_backward",
        "aten::multi_margin_loss_backward",
        "aten::multilabel_margin_loss_backward",
        # Of any value.
        "aten::binary_cross_entropy_with_logits",
    }
)
# Operators that check an index, with the arguments that decide, together with the sizes of the first, whether it is
# right. Of two that agree in these, such as `x[i]` and its backward, both fail or neither does.
_BY_INDEX = {
    "index": (1,),
    "_unsafe_index": (1,),
    "index_put": (1,),
    "_index_put_impl": (1,),
    "_unsafe_index_put": (1,),
    "gather": (1, 2),
    "scatter": (1, 2),
    "scatter_add": (1, 2),
    "index_select": (1, 2),
    "index_add": (1, 2),
}


def safe_updates(graph: Graph, device_type: str = "cpu") -> Graph:
    """The graph whose `replaces` only keeps outputs that no failure can leave half-written.

    If a step breaks off, every tensor has to have the contents it had before. So an output may only overwrite an input
    if everything that can fail comes before it in the flow of data, in whatever order the compiler runs the rest: then
    nothing is overwritten when something fails.
    """
    if not any(index is not None for index in graph.replaces):
        return graph
    checks: dict[Any, int] = {}  # what may fail, each with a bit
    behind: dict[Value, int] = dict.fromkeys(graph.inputs, 0)  # as a set of bits
    for node in graph.nodes:
        flows = 0
        for value in node.operands:
            flows |= behind[value]
        if _may_fail(node, device_type):
            flows |= checks.setdefault(_check(node), 1 << len(checks))
        for value in node.results:
            behind[value] = flows
    everything = (1 << len(checks)) - 1
    return replace(
        graph,
        replaces=tuple(
            index if index is not None and behind[value] == everything else None
            for value, index in zip(graph.outputs, graph.replaces, strict=True)
        ),
    )


def _may_fail(node: Node, device_type: str) -> bool:
    if node.op in _HARMLESS or node.op in VIEW_RULES:
        return False
    namespace, _, name = node.op.partition("::")
    if namespace != "aten":
        return True
    base = name.partition(".")[0]
    checked = _CHECKED.intersection(base.split("_"))
    if device_type == "cuda":
        checked -= _CHECKED_IN_KERNEL
    if checked:
        return True
    if base in _CHECKED_FOR_INTEGERS:
        return any(value.type.dtype in _INTEGERS for value in node.results)
    return operator(node.op).is_mutable and not name.startswith(("_fused_", "_native_batch_norm", "_foreach_"))


def _check(node: Node) -> Any:
    """What the node checks: equal for nodes of which both fail or neither does."""
    positions = _BY_INDEX.get(node.op.removeprefix("aten::").partition(".")[0])
    if positions is None or not isinstance(node.args[0], Value):
        return id(node)
    return (node.args[0].type.sizes, tuple(node.args[position] for position in positions))
