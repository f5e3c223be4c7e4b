"""The TorchScript backend: a step becomes a TorchScript graph, which PyTorch's JIT runs on the CPU or on CUDA.

jit.py        what is used of torch._C: graphs, the executor
types.py      and its types, by the names that generated lowerings use
writes.py     which nodes of a pure graph may write into their operands' buffers
lowering.py   TSLoweringContext: from a tarry graph to a TorchScript graph
data.py       TSData: a handle to a tensor or number
"""

from __future__ import annotations

from tarry.backends.base import Backend, Capabilities, Computation
from tarry.backends.torchscript.data import TSData
from tarry.backends.torchscript.lowering import TSLoweringContext, needs_python
from tarry.ir.graph import Graph, Node, Number
from tarry.ir.layout import TensorType
from tarry.ir.operators import operator

__all__ = ["TSData", "TSLoweringContext", "TorchScriptBackend"]


class TorchScriptBackend(Backend):
    """Every operator of ATen, numbers and seeds as inputs, parameters updated in place; same kernels as eager."""

    name = "torchscript"
    capabilities = Capabilities(updates_in_place=True)

    def takes_number(self, node: Node, number: Number, varied: bool) -> bool:
        return operator(node.op).index_of("dropout_p") < 0  # without dropout, they draw nothing

    def runs_ahead(self, graph: Graph) -> bool:
        return self.device == "cpu" and not needs_python(graph)

    def compile(self, graph: Graph) -> Computation:
        context = TSLoweringContext(graph, device=self.device)
        context.lower()
        return context.build()

    def placeholder(self, type_: TensorType) -> TSData:
        return TSData(type_, self)
