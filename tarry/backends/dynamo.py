"""Any torch.compile backend as a tarry backend: `(graph module, example inputs) -> callable` is all it has to be.

`tarry.set_backend("dynamo:openvino")` takes one that torch.compile knows by name, `tarry.set_backend(compiler)` a
function. It is given one FX graph of ATen operators for the whole step: forward, backward and optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from tarry.backends.base import Backend, Computation, PythonNumber, Run
from tarry.backends.fx import FxProgram, lower, takes_number
from tarry.backends.fx.lower import STRIDE_SENSITIVE
from tarry.backends.fx.opaque import is_opaque
from tarry.backends.lowering import with_all_inputs
from tarry.errors import BackendError, Unsupported
from tarry.ir.graph import Graph, Node, Number
from tarry.ir.operators import overload

# How torch.compile finds and calls a backend is not documented in all its parts, and was read off torch 2.11 and 2.13.
# What relies on it is in this file: the imports above, torch._TorchCompileInductorWrapper, torch._dynamo's registry.

PREFIX = "dynamo:"
Compiler = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]

_MISLEADING = frozenset({"aten::_scaled_dot_product_flash_attention_for_cpu"})
# torch's decomposition of it is for inference: it gives the attention's weights in place of their log-sum-exp, and the
# backward operator in the same graph would take them for that. Inductor does not use it.


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What is known of a torch.compile backend. Operators that it cannot take run on the real device, and count as
    fallbacks.

    `without`: operators ("aten::convolution_backward") that it does not know. Those for which torch has a decomposition
    are decomposed.
    `custom_operators`: it leaves operators that it has never heard of to PyTorch. Random operators are such (they stand
    in the graph as `tarry_opaque::*`, with their seed as an argument), and those that write and have no pure form.
    `hidden`: operators that it knows, but must not look into: they are given to it as custom operators.
    `strides`: values have the strides that PyTorch would give them, so that `as_strided` can count elements in memory.
    `dtypes`: those in which it computes exactly; None: all.
    `core_aten`: it knows the core ATen operators and not many more; others are decomposed first.
    `fake_inputs`: its examples may be fake tensors. Real ones take the memory of the step's inputs once more.
    `owned_results`: results are in memory that is made anew in each run. An engine may put its next results where the
    last ones are, so those of a compiler that is not known for this are copied.
    `options`: options for it, unless others are given.
    """

    without: frozenset[str] = frozenset()
    custom_operators: bool = True
    hidden: frozenset[str] = _MISLEADING
    strides: bool = True
    dtypes: frozenset[torch.dtype] | None = None
    core_aten: bool = False
    fake_inputs: bool = False
    owned_results: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def take(self, node: Node) -> bool:
        """Whether the compiler can be given a node."""
        if node.op in self.without or (not self.strides and node.op in STRIDE_SENSITIVE):
            return False
        if not self.custom_operators and (is_opaque(node) or node.op in self.hidden):
            return False
        return self.dtypes is None or all(v.type.dtype in self.dtypes for v in (*node.operands, *node.results))


_TORCH = Traits(hidden=frozenset(), fake_inputs=True, owned_results=True)
_DECOMPOSING = Traits(fake_inputs=True, owned_results=True)

TRAITS: Mapping[str, Traits] = {
    **dict.fromkeys(("eager", "eager_noexcept", "aot_eager", "aot_eager_default_partitioner", "inductor"), _TORCH),
    "aot_eager_decomp_partition": _DECOMPOSING,
    # A captured graph returns the same memory at every replay, and can neither seed a generator nor read from the host.
    "cudagraphs": Traits(custom_operators=False, fake_inputs=True, owned_results=False),
    # It computes in float32, and in bfloat16 by itself where the processor can: large integers come out cut off, small
    # ones saturate. It takes any tensor for contiguous, and these operators for such with one result. Seen in 2026.4.
    "openvino": Traits(
        without=frozenset({"aten::native_layer_norm", "aten::_native_batch_norm_legit_functional"}),
        strides=False,
        dtypes=frozenset({torch.float32, torch.bool}),
        core_aten=True,
        options={"config": {"INFERENCE_PRECISION_HINT": "f32"}},
    ),
}
"""What is known of compilers by name. Of others, nothing: then the defaults of `Traits` hold."""


class DynamoBackend(Backend):
    """Hands every step to a torch.compile backend. `mode` and `options` are those of `torch.compile`."""

    def __init__(
        self,
        compiler: str | Compiler,
        device: str = "cpu",
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        traits: Traits | None = None,
    ) -> None:
        super().__init__(device)
        named = compiler if isinstance(compiler, str) else getattr(compiler, "__name__", type(compiler).__name__)
        self.name = PREFIX + named
        self.traits = traits or (TRAITS.get(compiler, Traits()) if isinstance(compiler, str) else Traits())
        self.compiler = _bind(compiler, mode, _merged(self.traits.options, options or {}))

    def supports(self, node: Node) -> bool:
        return self.traits.take(node)

    def decompositions(self) -> Mapping[str, Callable[..., Any]]:
        return _decompositions(self.traits.without)

    def takes_number(self, node: Node, number: Number, varied: bool) -> bool:
        dtypes = self.traits.dtypes
        if number.dtype == torch.int64 and dtypes is not None and torch.int64 not in dtypes:
            return False  # as an input it would be an int64 tensor; a float64 tensor is rounded, as the number would be
        return takes_number(node, number, varied)

    def compile(self, graph: Graph) -> Computation:
        program = lower(graph, self.device, in_place=False, hidden=self.traits.hidden)
        try:
            module, examples, mode = _prepare(program, self.traits)
            text = module.print_readable(print_output=False)
            with tracing(TracingContext(mode)):
                compiled = self.compiler(module, examples)
        except Exception as error:
            raise Unsupported(None, self._gave_up(error)) from error
        if not callable(compiled):
            raise Unsupported(None, f"{self.name} gave {compiled!r}, which cannot be called")
        return Computation(_runner(program, compiled, self.traits.owned_results), graph, text=text)

    def _gave_up(self, error: Exception) -> str:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        cause = f" ({_headline(root)})" if root is not error else ""
        return f"{self.name} gave up: {_headline(error)}{cause}"


@functools.cache
def _decompositions(ops: frozenset[str]) -> Mapping[str, Callable[..., Any]]:
    """What torch knows of taking operators apart, by their names."""
    from torch._decomp import decomposition_table

    found = {op: decomposition_table.get(overload(op)) for op in ops - _MISLEADING}
    return {op: function for op, function in found.items() if function is not None}


def _headline(error: BaseException) -> str:
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message}"


# ---- the compiler


def _bind(compiler: str | Compiler, mode: str | None, options: dict[str, Any]) -> Compiler:
    """The compiler with its mode and options, as torch.compile would call it."""
    if compiler == "inductor":
        try:
            made: Compiler = torch._TorchCompileInductorWrapper(mode, options, dynamic=False)
        except RuntimeError as error:  # an option or a mode that Inductor does not have
            raise BackendError(f"dynamo:inductor: {error}") from error
        return made
    found = _find(compiler) if isinstance(compiler, str) else compiler
    given = {"mode": mode, "options": options}
    return functools.partial(found, **{name: value for name, value in given.items() if value})


def _find(name: str) -> Compiler:
    from torch._dynamo import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        found: Compiler = lookup_backend(name)
    except (InvalidBackend, ImportError) as error:
        known = ", ".join(sorted(other for other in list_backends(exclude_tags=()) if "TESTING_ONLY" not in other))
        raise BackendError(
            f"torch.compile has no backend {name!r} here ({_headline(error)}). It has {known}; others come with "
            f"packages that have to be installed, and some of them imported, first."
        ) from error
    return found


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options under those that are given; an option that is a dict on both sides is merged likewise."""
    merged = {**defaults, **given}
    for name in defaults.keys() & given.keys():
        if isinstance(defaults[name], Mapping) and isinstance(given[name], Mapping):
            merged[name] = {**defaults[name], **given[name]}
    return merged


# ---- what it is given, and what it gives


def _prepare(program: FxProgram, traits: Traits) -> tuple[torch.fx.GraphModule, list[torch.Tensor], FakeTensorMode]:
    """The graph and the examples as dynamo would give them, and the fake mode that belongs to them.

    Dynamo's examples are real, and its nodes have a fake tensor each under "example_value". Compilers that begin with
    AOTAutograd read "val", which AOTAutograd calls it.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True, shape_env=ShapeEnv(tracked_fakes=[]))
    with mode:
        fake = program.example_inputs()
    module = program.module
    if traits.core_aten or not traits.strides:
        # A view of a value that has come out with other strides than in PyTorch may have to be a copy.
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        module.recompile()
    if traits.core_aten:
        from torch._decomp import core_aten_decompositions

        module = make_fx(module, decomposition_table=dict(core_aten_decompositions()))(*fake)
    else:
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fake)
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    examples = fake if traits.fake_inputs else [tensor.zero_() for tensor in program.example_inputs()]
    return module, examples, mode


def _runner(program: FxProgram, compiled: Callable[..., Any], owned: bool) -> Run:
    def run(inputs: list[Any], numbers: list[PythonNumber]) -> Sequence[Any]:
        results = compiled(*inputs, *program.number_tensors(numbers))
        if not isinstance(results, tuple | list):
            results = (results,)
        return results if owned else [r.clone() if isinstance(r, torch.Tensor) else r for r in results]

    return with_all_inputs(program.graph, program.device, run)
