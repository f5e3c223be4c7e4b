"""What this backend takes from PyTorch's TorchScript: values of graphs, and the executor.

None of it is public. All names of `torch._C` that the backend uses are here and in types.py; checked on torch 2.11 and
2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from tarry.backends.torchscript.types import BOOL, COMPLEX, FLOAT, INT, NUMBER, TENSOR
from tarry.ir.layout import TensorType
from tarry.native import C

_C: Any = torch._C

JitValue: TypeAlias = Any
"""A `torch._C.Value`: what a value of our graph becomes."""
JitType: TypeAlias = Any
JitGraph: TypeAlias = Any


NUMBER_TYPES: dict[torch.dtype, JitType] = {
    torch.int64: INT,
    torch.float64: FLOAT,
    torch.bool: BOOL,
    torch.complex128: COMPLEX,
}
"""The type of an input that carries a Python number."""

_MEMORY_FORMATS = {  # c10::MemoryFormat, in its order
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


def schema(overload: Any) -> Any:
    """The schema of a torch.ops overload; types of its arguments and returns are those that TorchScript has."""
    return overload._schema


class JitBuilder:
    """A TorchScript graph under construction: appends nodes, keeps one copy of each constant."""

    def __init__(self, graph: JitGraph | None = None) -> None:
        self.graph: JitGraph = _C.Graph() if graph is None else graph
        self._constants: dict[Any, JitValue] = {}
        self._kept: list[JitValue] = []

    def input(self, name: str, type_: JitType) -> JitValue:
        value = self.graph.addInput(name)
        value.setType(type_)
        return value

    def node(self, kind: str, operands: Sequence[JitValue], types: Sequence[JitType]) -> Any:
        """Append a node. TorchScript finds the operator's overload by the types of the operands."""
        made = self.graph.create(kind, list(operands), len(types))
        for output, type_ in zip(made.outputs(), types, strict=True):
            output.setType(type_)
        self.graph.insertNode(made)
        return made

    def one(self, kind: str, operands: Sequence[JitValue], type_: JitType = TENSOR) -> JitValue:
        return self.node(kind, operands, (type_,)).output()

    def operand(self, arg: Any, type_: JitType) -> JitValue:
        """An argument as a value that fits a slot of this type: values as they are, anything else as a constant."""
        if type_.kind() == "OptionalType":
            if arg is None:
                return self._none(type_)
            type_ = type_.getElementType()
        if arg is None and type_.kind() == "TensorType":
            return self.one("prim::AutogradZero", ())  # an undefined tensor: some operators take it for an absent one
        if isinstance(arg, tuple | list):
            element = type_.getElementType() if type_.kind() == "ListType" else INT
            if arg and not any(isinstance(item, _C.Value) for item in arg) and element.kind() in _PLAIN:
                return self._constant(list(arg), element)
            items = [self.operand(item, element) for item in arg]
            return self.one("prim::ListConstruct", items, _C.ListType(element))
        value = arg if isinstance(arg, _C.Value) else self._constant(arg, type_)
        if type_.kind() == "NumberType" and value.type().kind() == "BoolType":
            # A bool is a number to operators, but not to TorchScript's types.
            return self.one("prim::unchecked_cast", (value,), NUMBER)
        return value

    def _none(self, type_: JitType) -> JitValue:
        """None as an absent value of a type: an untyped None may fit several overloads."""
        key = (None, str(type_))
        if key not in self._constants:
            self._constants[key] = self.graph.insertConstant(None)
            self._constants[key].setType(type_)
        return self._constants[key]

    def _constant(self, constant: Any, type_: JitType) -> JitValue:
        kind = type_.kind()
        if isinstance(constant, torch.memory_format):
            constant = _MEMORY_FORMATS[constant]
        elif kind == "FloatType":
            constant = [float(item) for item in constant] if isinstance(constant, list) else float(constant)
        elif kind == "TensorType":
            return self.one("tarry::wrapped_number", (self.operand(constant, NUMBER),))
        key = (kind, str(type(constant)), repr(constant))  # repr tells -0.0 from 0.0 and makes NaN equal NaN
        if key not in self._constants:
            self._constants[key] = self.graph.insertConstant(constant)
        return self._constants[key]

    def keep_list(self, value: JitValue) -> None:
        """Note that a node has written to the tensors of a list. TorchScript takes that for a write to the list alone,
        and drops the node if nothing reads that list afterwards: so its length is read, and returned."""
        if value.type().kind() == "ListType":
            self._kept.append(self.one("aten::len", (value,), INT))

    def finish(self, results: Sequence[JitValue]) -> JitGraph:
        """Return a tuple that begins with these values."""
        returned = [*results, *self._kept]
        types = [value.type() for value in returned]
        self.graph.registerOutput(self.one("prim::TupleConstruct", returned, _C.TupleType(types)))
        return self.graph


_PLAIN = frozenset({"IntType", "FloatType", "BoolType", "StringType"})
"""Types of elements whose lists can be constants."""


def matched_operator(node: Any) -> str:
    """The operator that TorchScript takes a node for, with its overload; RuntimeError if it finds none."""
    return str(node.schema()).partition("(")[0]


class Executable:
    """A graph as a function of its inputs.

    It is run by TorchScript's interpreter as it is: the profiling executor would run it twice with hooks, then rewrite
    it, and its fusers have nothing for a CPU and little for a GPU that is worth the compilation.
    """

    def __init__(self, graph: JitGraph) -> None:
        self._function = _C._create_function_from_graph("tarry_step", graph)
        self.call: Callable[..., tuple[Any, ...]] = self._first_call

    def _first_call(self, *args: Any) -> tuple[Any, ...]:
        with _simple_executor():  # the function's executor is made by the first call
            results: tuple[Any, ...] = self._function(*args)
        self.call = self._function
        return results


def native_program(
    graph: JitGraph, numbers: Sequence[Any], returned: Sequence[int], types: Sequence[TensorType], device: torch.device
) -> Any:
    """The graph as a program that runs without Python: its inputs are tensors, then these numbers; its outputs have
    these types."""
    if device.type != "cpu":
        return None
    return C.script_program(
        graph, list(numbers), list(returned), [(list(t.sizes), list(t.strides), t.dtype) for t in types]
    )


@contextmanager
def _simple_executor() -> Iterator[None]:
    """Within the block, functions that are called for the first time get the executor that does not profile."""
    executor = _C._jit_set_profiling_executor(True)
    profiling = _C._jit_set_profiling_mode(False)
    optimize = _C._get_graph_executor_optimize()
    _C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        _C._set_graph_executor_optimize(optimize)
        _C._jit_set_profiling_mode(profiling)
        _C._jit_set_profiling_executor(executor)
