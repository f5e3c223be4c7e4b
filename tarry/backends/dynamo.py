"""Any torch.compile backend as a tarry backend: `(graph module, example inputs) -> callable` is all it has to be.

`tarry.set_backend("dynamo:cudagraphs")` takes one that torch.compile knows by name, `tarry.set_backend(compiler)` a function.
It is given one FX graph of ATen operators for the whole step: forward, backward and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tarry.backends.base import Backend, Computation, PythonNumber
from tarry.backends.fx import lower, takes_number
from tarry.errors import BackendError, Unsupported
from tarry.ir.graph import Graph, Node, Number

PREFIX = "dynamo:"
Compiler = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


class DynamoBackend(Backend):
    """Hands every step to a torch.compile backend. Options are passed on to it as keyword arguments."""

    def __init__(self, compiler: str | Compiler, device: str = "cpu", **options: Any) -> None:
        super().__init__(device)
        self.compiler = _find(compiler) if isinstance(compiler, str) else compiler
        self.options = options
        self.name = PREFIX + (compiler if isinstance(compiler, str) else getattr(compiler, "__name__", "function"))

    def takes_number(self, node: Node, number: Number, varied: bool) -> bool:
        return takes_number(node, number, varied)

    def compile(self, graph: Graph) -> Computation:
        program = lower(graph, self.device, in_place=False)
        examples = [tensor.zero_() for tensor in program.example_inputs()]
        torch.fx.passes.fake_tensor_prop.FakeTensorProp(program.module).propagate(*examples)
        try:
            compiled = self.compiler(program.module, examples, **self.options)
        except Exception as error:
            raise Unsupported(None, f"{self.name} gave up: {type(error).__name__}: {error}") from error

        def run(inputs: list[Any], numbers: list[PythonNumber]) -> list[Any]:
            results = compiled(*inputs, *program.number_tensors(numbers))
            return list(results) if isinstance(results, tuple | list) else [results]

        return Computation(run, graph, text=lambda: program.module.print_readable(print_output=False))


def _find(name: str) -> Compiler:
    from torch._dynamo import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        found: Compiler = lookup_backend(name)
    except (InvalidBackend, ImportError, ModuleNotFoundError) as error:
        known = ", ".join(sorted(list_backends(exclude_tags=())))
        raise BackendError(
            f"torch.compile has no backend {name!r} here ({error}). It has {known}; others come with packages that have "
            f"to be installed and imported first."
        ) from error
    return found
