"""Operators that a compiler must not look into, as pure operators of the namespace `tarry_opaque`.

A random operator draws from the seed that its node carries, and gives the bits that eager PyTorch gives for that seed;
an operator that writes and has no pure form runs on copies. Either becomes a pure operator with the same arguments, but
for the generator: in its place stands the seed, as a tensor of one int64, so that it can be an input of a compiled
program. So do numbers that change from step to step, of a custom operator or a fused optimizer, as tensors of one
element on the host.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from tarry.codegen.op_table import facts
from tarry.ir.evaluate import run_node
from tarry.ir.graph import HERE, GraphBuilder, Node, Number
from tarry.ir.layout import TensorType
from tarry.ir.operators import draws_nothing, operator
from tarry.ir.sizes import Size

NAMESPACE = "tarry_opaque"
_NUMBER = "a number that is a tensor here"


def schema_type(printed: str) -> str:
    """A type as schemas spell it, given as PyTorch prints it: "Optional[List[number]]" is "Scalar[]?"."""
    for wrapper, suffix in (("Optional[", "?"), ("List[", "[]")):
        if printed.startswith(wrapper):
            return schema_type(printed[len(wrapper) : -1]) + suffix
    return {"number": "Scalar", _NUMBER: "Tensor"}.get(printed, printed)


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")


@functools.cache
def laid_out() -> Any:
    """`laid_out(x, strides)`: a copy in a buffer of its own, with these strides.

    `as_strided` counts elements from the start of a buffer. Compilers drop copies that they take for needless, so that
    it would count from the start of a larger one; a copy that they cannot look into stays.
    """
    library = _library()
    library.define("laid_out(Tensor x, int[] strides) -> Tensor", tags=(torch.Tag.flexible_layout,))

    def copy(x: torch.Tensor, strides: list[int]) -> torch.Tensor:
        return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)

    library.impl("laid_out", copy, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::laid_out", copy, lib=library)
    return getattr(torch.ops, NAMESPACE).laid_out.default


@functools.cache
def keep_mask() -> Any:
    """`keep_mask(sizes, keep, seed)`: on the CPU, a mask that is True with probability `keep`: the very bits that
    dropout draws in eager PyTorch from a generator with this seed."""
    library = _library()
    library.define("keep_mask(SymInt[] sizes, float keep, Tensor seed) -> Tensor")

    def draw(sizes: list[int], keep: float, seed: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(seed))
        return torch.empty(sizes, dtype=torch.bool).bernoulli_(keep, generator=generator)

    library.impl("keep_mask", draw, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"{NAMESPACE}::keep_mask", lambda sizes, keep, seed: torch.empty(sizes, dtype=torch.bool), lib=library
    )
    return getattr(torch.ops, NAMESPACE).keep_mask.default


_exact: dict[Any, Any] = {}


def exact(overload: Any) -> Any:
    """The operator itself under a name that a compiler does not know: it calls eager's kernel."""
    if overload not in _exact:
        schema = str(overload._schema)
        name = "exact_" + schema[: schema.index("(")].removeprefix("aten::").replace(".", "_")
        library = _library()
        library.define(name + schema[schema.index("(") :], tags=(torch.Tag.needs_exact_strides,))
        library.impl(name, overload, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", overload, lib=library)
        _exact[overload] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return _exact[overload]


def called_exactly(made: Any) -> Any:
    """The operator that `exact` has given this form; what is given if there is none."""
    return next((overload for overload, known in _exact.items() if known is made), made)


def is_masked(node: Node, device: torch.device) -> bool:
    """Whether a node is dropout of which only the mask is opaque: the compiler sees that it multiplies."""
    return (
        node.op == "aten::native_dropout"
        and node.seed is not None
        and device.type == "cpu"
        and not draws_nothing(node.op, node.args)
    )


def is_opaque(node: Node) -> bool:
    """Whether a node has to be called through `opaque`."""
    if any(_is_number(arg) for arg in node.args) and facts(node.op).numbers_on_host:
        return True
    if draws_nothing(node.op, node.args):
        return False
    return node.kept or node.drawn_from is not None


def _is_number(arg: Any) -> bool:
    return isinstance(arg, Number) and arg.kind == "number"


def opaque(node: Node) -> tuple[Any, list[int]]:
    """The pure operator for a node, and which arguments of the node it takes; the seed follows, if the node has one.
    Numbers that are inputs of the graph are tensors to it. Sizes and strides of the results come last, if they vary."""
    arguments = operator(node.op).arguments
    taken = [k for k, argument in enumerate(arguments) if "Generator" not in argument.type]
    types = tuple(None if value is None else value.type for value in node.outputs)
    if has_sizes(node):  # which sizes is no part of the operator then
        types = tuple(None if t is None else TensorType(t.dtype, (0,) * t.rank, (0,) * t.rank) for t in types)
    declared = tuple(
        _NUMBER if _is_number(arg) else argument.type for arg, argument in zip(node.args, arguments, strict=True)
    )
    return _define(node.op, declared, types, node.drawn_from is not None, has_sizes(node)), taken


def has_sizes(node: Node) -> bool:
    """Whether the types of a node's results vary, so that its opaque operator takes them as arguments."""
    return any(isinstance(n, Size) for value in node.results for n in (*value.type.sizes, *value.type.strides))


@functools.cache
def _define(op: str, declared: tuple[str, ...], types: tuple[TensorType | None, ...], seeded: bool, sized: bool) -> Any:
    """One operator for each set of result types: what comes out is known from the recording, so nothing infers it. And
    for each schema: a custom operator may be declared anew with another."""
    taken = [type_ for type_ in declared if "Generator" not in type_]
    made = tuple(type_ for type_ in types if type_ is not None)
    identity = repr((op, declared, types, seeded, sized)) if sized else repr((op, declared, types, seeded))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]  # the same in every process
    name = f"{op.replace('::', '_').replace('.', '_')}_{digest}"
    parameters = [f"{schema_type(type_)} a{k}" for k, type_ in enumerate(taken)]
    if seeded:
        parameters.append("Tensor seed")
    fixed = len(parameters)
    if sized:
        parameters += [f"SymInt[] {what}{k}" for k in range(len(made)) for what in ("sizes", "strides")]
    returns = "Tensor" if len(made) == 1 else "(" + ", ".join(["Tensor"] * len(made)) + ")"
    library = _library()
    library.define(f"{name}({', '.join(parameters)}) -> {returns}", tags=(torch.Tag.needs_exact_strides,))

    def call(*args: Any) -> Any:
        given = [arg.item() if type_ is _NUMBER else arg for arg, type_ in zip(args, taken, strict=False)]
        return _call(op, (*given, *args[len(taken) : fixed]), _sized(types, args[fixed:]), seeded)

    def fake(*args: Any) -> Any:
        kinds = [type_ for type_ in _sized(types, args[fixed:]) if type_ is not None]
        return _one_or_all(_empty(kinds, _device(args[:fixed])))

    library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _sized(types: tuple[TensorType | None, ...], given: tuple[Any, ...]) -> tuple[TensorType | None, ...]:
    """The types with these sizes and strides, one after the other; as they are if none are given."""
    if not given:
        return types
    rest = iter(given)
    return tuple(
        None if type_ is None else TensorType(type_.dtype, tuple(next(rest)), tuple(next(rest))) for type_ in types
    )


def _call(op: str, args: tuple[Any, ...], types: tuple[TensorType | None, ...], seeded: bool) -> Any:
    """Run the call as a node of its own."""
    builder = GraphBuilder()
    operands: list[torch.Tensor] = []

    def operand(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            operands.append(arg)
            return builder.input(TensorType.of(arg))
        if isinstance(arg, list | tuple):
            return tuple(operand(item) for item in arg)
        return HERE if isinstance(arg, torch.device) else arg

    given = iter([operand(arg) for arg in (args[:-1] if seeded else args)])
    seed = builder.number("seed", torch.int64, 0) if seeded else None
    arguments = operator(op).arguments
    full = [seed if "Generator" in argument.type else next(given) for argument in arguments]
    own_seed = seed if seed is not None and not any(arg is seed for arg in full) else None
    builder.node(op, full, types, kept=operator(op).is_mutable, seed=own_seed)
    graph = builder.finish([])
    environment = dict(zip(graph.inputs, operands, strict=True))
    (node,) = graph.nodes
    run_node(node, environment, [int(args[-1])] if seeded else [], _device(args))
    return _one_or_all([environment[value] for value in node.results])


def _device(args: tuple[Any, ...]) -> torch.device:
    """Where a call takes place: where it says, else where its first tensor is."""
    flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else (arg,))]
    asked = [item for item in flat if isinstance(item, torch.device)]
    return asked[0] if asked else next(item.device for item in flat if isinstance(item, torch.Tensor))


def _empty(types: Iterable[TensorType], device: torch.device) -> list[torch.Tensor]:
    return [torch.empty_strided(t.sizes, t.strides, dtype=t.dtype, device=device) for t in types]


def _one_or_all(made: list[torch.Tensor]) -> Any:
    return made[0] if len(made) == 1 else tuple(made)
