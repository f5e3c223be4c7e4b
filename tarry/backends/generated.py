"""The base of backends that `python -m tarry.codegen` generates: an operator is a kernel, a step is kernels in order.

A kernel is a function from the backend's data to the backend's data. Those of `full_codegen` are generated and end in
`builtin`, which the author overrides to say how an operator of PyTorch's is carried out in general; those of
`supported` the author writes one by one. Graphs are pure, so kernels are: an in-place operator's kernel is that of its
functional form.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import torch

from tarry.backends.base import Backend, PythonNumber, Run
from tarry.codegen.forms import FORMS
from tarry.codegen.op_table import facts
from tarry.ir.evaluate import drawing, seeded
from tarry.ir.graph import HERE, Graph, Node, Number, Value, map_leaves
from tarry.ir.infer import fresh_results
from tarry.ir.layout import TensorType
from tarry.ir.operators import operator, overload
from tarry.native import C
from tarry.passes.foreach import unroll_foreach

Kernel: TypeAlias = Callable[..., Any]


class GeneratedBackend(Backend):
    """A backend made of kernels, by the names that operators have in graphs ("aten::add.Tensor")."""

    generated: ClassVar[Mapping[str, Kernel]] = {}
    """Kernels of `full_codegen`: called with the backend, then the operator's arguments."""
    written: ClassVar[Mapping[str, Kernel]] = {}
    """Kernels of `supported`: called with the operator's arguments."""
    autograd: ClassVar[Mapping[str, Kernel]] = {}
    """Functions of tensors that replace PyTorch's autograd of an operator while this is the backend in use."""

    decomposed: ClassVar[Sequence[str]] = ()
    """Operators ("_log_softmax") to be taken apart by PyTorch's recipes besides those that are no core operators."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.kernels: dict[str, Kernel] = {
            **{name: functools.partial(kernel, self) for name, kernel in self.generated.items()},
            **self.written,
        }
        self._whole = [name for name in self.kernels if _is_composite(name)]
        self.kernels = {**_forms(self.kernels, self), **self.kernels}
        self._library: Any = None
        self._recorded: list[C.RecordedWhole] = []

    # ---- what an author overrides

    def builtin(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """Carry out an operator without a kernel. Here: PyTorch's own, on the real device."""
        args = self.to_tensor_all(args)
        if op in _OVERRIDEABLE:
            op, args = _OVERRIDEABLE[op](args)
        return self.to_data_all(overload(op)(*args, **kwargs))

    def result(self, data: Any, type_: TensorType) -> Any:
        """What a kernel returned, as data of exactly the dtype and sizes of a type. Here: as it is."""
        return data

    # ---- the contract

    def supports(self, node: Node) -> bool:
        is_pure = not node.kept or _only_reads_statistics(node)  # one that writes needs copies
        return self._kernel_name(node.op) in self.kernels and is_pure

    def decompositions(self) -> Mapping[str, Callable[..., Any]]:
        """PyTorch's recipes into core operators, and those of `decomposed`."""
        recipes = _recipes(tuple(self.decomposed))
        if "aten::native_batch_norm" in self.kernels:
            return {**recipes, "aten::_native_batch_norm_legit_functional": _batch_norm_with_statistics}
        return recipes

    def compile(self, graph: Graph) -> Run:
        graph = unroll_foreach(graph)
        steps = [_Step(node, self.kernels[node.op], self) for node in graph.nodes]
        for step, dropped in zip(steps, _last_reads(graph), strict=True):
            step.drops = dropped

        def run(inputs: list[Any], numbers: list[PythonNumber]) -> list[Any]:
            values: dict[Value, Any] = dict(zip(graph.inputs, inputs, strict=True))
            for step in steps:
                step(values, numbers)
            return [values[value] for value in graph.outputs]

        return run

    def setup(self) -> None:
        """Register the autograd functions, and have operators that PyTorch would take apart recorded whole if there is
        a kernel. Both hold for the device, so they go when another backend comes."""
        self._recorded = [C.RecordedWhole(name) for name in self._whole]
        if self.autograd:
            self._library = torch.library.Library("aten", "IMPL")
            for name, function in self.autograd.items():
                self._library.impl(name.removeprefix("aten::"), _complete(name, function), "AutogradPrivateUse1")

    def teardown(self) -> None:
        self._recorded = []
        if self._library is not None:
            self._library._destroy()  # checked on torch 2.11 and 2.13; there is no public way
            self._library = None

    # ---- helpers

    def to_tensor_all(self, args: Any) -> Any:
        """Arguments with tensors of the real device in place of the backend's data."""
        if isinstance(args, tuple | list):
            return type(args)(self.to_tensor_all(item) for item in args)
        return self.to_tensor(args) if self.is_data(args) else args

    def to_data_all(self, results: Any) -> Any:
        """Results with the backend's data in place of tensors."""
        if isinstance(results, tuple | list):
            return [self.to_data_all(item) for item in results]
        return self.to_data(results) if isinstance(results, torch.Tensor) else results

    def is_data(self, arg: Any) -> bool:
        """Whether an argument of a kernel is the backend's data rather than a number or an option."""
        return isinstance(arg, torch.Tensor)

    def _kernel_name(self, op: str) -> str:
        return op if op in self.kernels else facts(op).element or op


class _Step:
    """One node, ready to run: which arguments are positional, what they resolve to."""

    def __init__(self, node: Node, kernel: Kernel, backend: GeneratedBackend) -> None:
        self.node = node
        self.kernel = kernel
        self.device = torch.device(backend.device)
        self.finish = backend.result
        self.drops: Sequence[Value] = ()
        arguments = operator(node.op).arguments
        count = sum(not argument.kwarg_only for argument in arguments)
        self.positional = node.args[:count]
        self.keyword = {argument.name: arg for argument, arg in zip(arguments[count:], node.args[count:], strict=True)}

    def __call__(self, values: dict[Value, Any], numbers: list[PythonNumber]) -> None:
        def leaf(item: Any) -> Any:
            if isinstance(item, Value):
                return values[item]
            if isinstance(item, Number):
                return self._number(item, numbers[item.index])
            return self.device if item is HERE else item

        def resolve(arg: Any) -> Any:
            made = map_leaves(arg, leaf)
            return list(made) if isinstance(made, tuple) else made

        args = [resolve(arg) for arg in self.positional]
        kwargs = {name: resolve(arg) for name, arg in self.keyword.items()}
        with seeded(self.device, None if self.node.seed is None else int(numbers[self.node.seed.index].real)):
            result = self.kernel(*args, **kwargs)
        unchanged = [args[k] for k in operator(self.node.op).written] if self.node.kept else []
        made = zip(self.node.outputs, [*fresh_results(self.node.op, result), *unchanged], strict=True)
        values.update((value, self.finish(data, value.type)) for value, data in made if value is not None)
        for value in self.drops:
            del values[value]

    def _number(self, number: Number, value: PythonNumber) -> Any:
        return torch.Generator(self.device).manual_seed(int(value.real)) if number.kind == "seed" else value


def _last_reads(graph: Graph) -> list[list[Value]]:
    """For each node, the values that nothing needs after it."""
    left = Counter(value for node in graph.nodes for value in set(node.operands))
    kept = set(graph.outputs)
    dropped: list[list[Value]] = []
    for node in graph.nodes:
        gone = []
        for value in dict.fromkeys(node.operands):
            left[value] -= 1
            if left[value] == 0 and value not in kept:
                gone.append(value)
        gone += [value for value in node.results if not left[value] and value not in kept]
        dropped.append(gone)
    return dropped


# PyTorch's own device has no kernels of these: they are the hooks of devices for `convolution`.
_OVERRIDEABLE: Mapping[str, Callable[[Any], tuple[str, Any]]] = {
    "aten::convolution_overrideable": lambda args: ("aten::convolution", args),
    "aten::convolution_backward_overrideable": lambda args: (
        "aten::convolution_backward",
        (*args[:3], [args[0].shape[1]], *args[3:]),
    ),
}


@functools.cache
def _recipes(more: tuple[str, ...]) -> Mapping[str, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions, get_decompositions

    found = dict(core_aten_decompositions())
    found.update(get_decompositions([getattr(torch.ops.aten, name) for name in more]))
    return {chosen.name(): recipe for chosen, recipe in found.items() if isinstance(chosen, torch._ops.OpOverload)}


def _complete(name: str, function: Kernel) -> Kernel:
    """An autograd function that is given all arguments: PyTorch leaves out those at the end that have their default."""
    arguments = operator(name).arguments
    defaults = [argument.default_value for argument in overload(name)._schema.arguments]
    positional = [default for argument, default in zip(arguments, defaults, strict=True) if not argument.kwarg_only]
    keywords = {a.name: default for a, default in zip(arguments, defaults, strict=True) if a.kwarg_only}

    @functools.wraps(function)
    def complete(*args: Any, **kwargs: Any) -> Any:
        return function(*args, *positional[len(args) :], **{**keywords, **kwargs})

    return complete


def _is_composite(name: str) -> bool:
    """Whether PyTorch takes an operator apart. Private to torch: checked on 2.11 and 2.13."""
    has: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not has(name, "PrivateUse1")


def _only_reads_statistics(node: Node) -> bool:
    return node.op == "aten::_native_batch_norm_legit" and node.args[5] is False


def _batch_norm_with_statistics(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    """The form that gives the new running statistics, too, made of the one that does not."""
    if not training:
        results = torch.ops.aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, momentum, eps)
        return (*results, mean.clone(), var.clone())
    results = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    batch = torch.var(x.to(var.dtype), [0, *range(2, x.dim())], correction=1)
    moved = [old * (1 - momentum) + new * momentum for old, new in ((mean, results[1]), (var, batch))]
    return (*results, *moved)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Within the block, operators go straight to the backend: for an autograd function that calls its own operator."""
    guard = torch._C._AutoDispatchBelowAutograd()  # checked on torch 2.11 and 2.13
    try:
        yield
    finally:
        del guard


# Kernels for operators that graphs have in place of a listed one, made of the listed one's.


def _forms(kernels: Mapping[str, Kernel], backend: GeneratedBackend) -> dict[str, Kernel]:
    """The kernels that follow from those that there are. One that is listed itself has its own."""
    made: dict[str, Kernel] = {}
    for listed, names in FORMS.items():
        if f"aten::{listed}" in kernels:
            adapted = _ADAPTERS[listed](kernels, backend)
            assert adapted.keys() == {f"aten::{name}" for name in names}
            made.update(adapted)
    return made


def _batch_norms(kernels: Mapping[str, Kernel], backend: GeneratedBackend) -> dict[str, Kernel]:
    """The forms that give three results: they write to no running statistics, but one reads them."""
    kernel = kernels["aten::native_batch_norm"]

    def no_stats(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
        return kernel(x, weight, bias, None, None, training, momentum, eps)

    def no_training(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Any:
        return kernel(x, weight, bias, mean, var, False, momentum, eps)

    return {
        "aten::_native_batch_norm_legit": kernel,
        "aten::_native_batch_norm_legit.no_stats": no_stats,
        "aten::_native_batch_norm_legit_no_training": no_training,
    }


def _full(kernels: Mapping[str, Kernel], backend: GeneratedBackend) -> dict[str, Kernel]:
    """What `fill_` and `zero_` are in graphs."""

    def full(size: list[int], fill_value: Any, *, dtype: torch.dtype | None, **options: Any) -> Any:
        like = torch.full(size, fill_value, dtype=dtype, device="meta")
        empty = kernels.get("aten::empty_strided")
        if empty is None:
            filled = backend.to_data(torch.empty_like(like, device=backend.device))
        else:
            filled = empty(size, list(like.stride()), dtype=like.dtype, **options)
        return kernels["aten::fill.Scalar"](filled, fill_value)

    return {"aten::full": full}


def _convolution(kernels: Mapping[str, Kernel], backend: GeneratedBackend) -> dict[str, Kernel]:
    return {"aten::convolution": kernels["aten::convolution_overrideable"]}


def _convolution_backward(kernels: Mapping[str, Kernel], backend: GeneratedBackend) -> dict[str, Kernel]:
    kernel = kernels["aten::convolution_backward_overrideable"]

    def backward(grad: Any, x: Any, weight: Any, bias_sizes: list[int] | None, *options: Any) -> Any:
        return kernel(grad, x, weight, *options)

    return {"aten::convolution_backward": backward}


def _randperm(kernels: Mapping[str, Kernel], backend: GeneratedBackend) -> dict[str, Kernel]:
    def randperm(n: int, *, generator: torch.Generator | None, **options: Any) -> Any:
        with drawing(generator):
            return kernels["aten::randperm"](n, **options)

    return {"aten::randperm.generator": randperm}


_ADAPTERS: Mapping[str, Callable[[Mapping[str, Kernel], GeneratedBackend], dict[str, Kernel]]] = {
    "native_batch_norm": _batch_norms,
    "fill.Scalar": _full,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    "randperm": _randperm,
}
