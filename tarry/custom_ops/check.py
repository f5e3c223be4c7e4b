"""`CustomOp.check`: does the operator do what its declaration says?

Each check is a function from a `Case` to the faults that it finds. A check whose subject raises reports that as a fault
and lets the others go on: one run shows everything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tarry import _api, pytree
from tarry.custom_ops import lowering
from tarry.custom_ops.autograd import call_with
from tarry.custom_ops.comparison import difference, same_bytes
from tarry.custom_ops.conflicts import has_abstract
from tarry.custom_ops.declared import Declared
from tarry.custom_ops.gradients import check_gradients, check_incoming, gradients
from tarry.custom_ops.schema import written_positions
from tarry.errors import CustomOpCheckError

SEED = 1234


@dataclass
class Case:
    """An operator with the arguments that it is tested on, in the order of its schema."""

    op: Declared
    values: list[Any]
    versions: list[int] = field(default_factory=list)
    """How often each tensor of `plain` had been written to before the call."""

    def copies(self, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[Any]:
        """Arguments that may be written to; two that are views of one buffer stay so. `change` is applied to each."""
        buffers: dict[int, torch.UntypedStorage] = {}

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            storage = leaf.untyped_storage()
            if storage._cdata not in buffers:
                buffers[storage._cdata] = storage.clone()
            twin = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            twin.set_(buffers[storage._cdata], leaf.storage_offset(), leaf.shape, leaf.stride())
            return twin if change is None else change(twin)

        return [pytree.tree_map(copy, value) for value in self.values]

    def call(self, values: Sequence[Any]) -> Any:
        """Call the operator, with the same random numbers each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return call_with(self.op, values)

    @property
    def gradient_at(self) -> str:
        """Where the backward function is registered; empty if there is none."""
        found = [self.op._impls[kind].location for kind in ("backward", "autograd") if kind in self.op._impls]
        return found[0] if found and (self.op._formula or "autograd" in self.op._impls) else ""

    def differentiated(self, values: Sequence[Any]) -> Any:
        """Call the operator on copies of what it writes to, and return the new contents with its results."""
        written = written_positions(self.op._schema)
        copies = [
            pytree.tree_map_only(torch.Tensor, torch.clone, v) if k in written else v for k, v in enumerate(values)
        ]
        return self.call(copies), [copies[k] for k in written]

    @cached_property
    def plain(self) -> tuple[list[Any], Any]:
        """The arguments after a call without gradients, and its results."""
        values = self.copies()
        self.versions = [tensor._version for _, _, tensor in self.tensors(values)]
        with torch.no_grad():
            return values, self.call(values)

    @cached_property
    def again(self) -> tuple[list[Any], Any]:
        """The same of a second call: with other random numbers, if the operator must not look at them."""
        values = self.copies()
        with torch.no_grad():
            if self.is_random:
                return values, self.call(values)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(SEED + 1)
                return values, call_with(self.op, values)

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.op._overload.tags

    def tensors(self, values: Sequence[Any]) -> Iterator[tuple[str, Any, torch.Tensor]]:
        """Every tensor among the arguments, with a name for it and what the schema says of the argument."""
        for declared, value in zip(self.op._overload._schema.arguments, values, strict=True):
            for index, leaf in enumerate(pytree.tree_leaves(value)):
                if isinstance(leaf, torch.Tensor):
                    yield (f"{declared.name}[{index}]" if isinstance(value, list) else declared.name), declared, leaf

    def results(self, result: Any) -> Iterator[tuple[str, Any, torch.Tensor]]:
        """Every tensor among the results, with a name for it and what the schema says of it."""
        returns = self.op._overload._schema.returns
        parts = (result,) if len(returns) == 1 else result or ()
        for index, (declared, part) in enumerate(zip(returns, parts, strict=True)):
            name = "the result" if len(returns) == 1 else f"result {index}"
            for position, leaf in enumerate(part if isinstance(part, list) else [part]):
                if isinstance(leaf, torch.Tensor):
                    yield (f"{name}[{position}]" if isinstance(part, list) else name), declared, leaf


def check(op: Declared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run all checks on a call. Raises CustomOpCheckError with everything that is wrong."""
    case = Case(op, _in_order(op, args, kwargs))
    if any(tensor.device.type == "tarry" for _, _, tensor in case.tensors(case.values)):
        raise TypeError(f"{op}.check takes tensors of a real device; it moves them to tarry by itself")
    try:
        _ = case.plain
    except Exception as error:
        raise CustomOpCheckError(f"{op}.check: the call itself raises {_first_line(error)}") from error
    faults: list[str] = []
    for title, find in CHECKS.items():
        faults += [f"{title}: {fault}" for fault in _faults(find, case)]
    if faults:
        listed = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(faults, 1))
        raise CustomOpCheckError(f"{op}.check found {len(faults)} fault{'s' if len(faults) > 1 else ''}:\n{listed}")


def _faults(find: Callable[[Case], Iterator[str]], case: Case) -> list[str]:
    try:
        return list(find(case))
    except Exception as error:
        return [f"it raises {_first_line(error)}"]


def _in_order(op: Declared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    names = [name for name, _, _ in op._arguments]
    if len(args) > len(names) or not set(kwargs) <= set(names):
        raise TypeError(f"{op}.check takes the operator's arguments: {op._schema}")
    given = dict(zip(names, args, strict=False)) | kwargs
    missing = [a.name for a in op._overload._schema.arguments if a.name not in given and not a.has_default_value()]
    if missing:
        raise TypeError(f"{op}.check: missing {', '.join(missing)}; the operator is {op._schema}")
    values = [given.get(name, default) for name, _, default in op._arguments]
    return [list(value) if isinstance(value, tuple) else value for value in values]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


# ---- the checks


def _mutation(case: Case) -> Iterator[str]:
    after, _ = case.plain
    tensors = zip(case.tensors(after), case.tensors(case.values), case.versions, strict=True)
    for (name, declared, now), (_, _, before), version in tensors:
        written = declared.alias_info is not None and declared.alias_info.is_write
        # Other arguments may bring other values: the count of writes shows those that change nothing here.
        if not written and (now._version != version or not same_bytes(now, before)):
            advice = "Name it in mutates_args, or copy it first"
            yield f"argument {name} was written to, and the schema does not say so. {advice}"


def _aliasing(case: Case) -> Iterator[str]:
    after, result = case.plain
    seen: dict[int, str] = {}
    for name, declared, made in case.results(result):
        buffer = made.untyped_storage()._cdata
        bases = [(n, d) for n, d, t in case.tensors(after) if t.untyped_storage()._cdata == buffer and t.numel()]
        aliases = set() if declared.alias_info is None else set(declared.alias_info.before_set)
        for base, argument in bases:
            if argument.alias_info is None or not aliases & set(argument.alias_info.before_set):
                advice = "Return a copy (.clone())"
                yield f"{name} shares memory with argument {base}, and the schema does not say so. {advice}"
        if aliases and not bases and made.numel():
            yield f"{name} is declared as an alias of an argument, and is none. Remove the annotation from the schema"
        if buffer in seen and made.numel() and not aliases:
            yield f"{name} shares memory with {seen[buffer]}. Return a copy of one of them"
        seen[buffer] = name
    for (name, declared, made), (_, _, second) in zip(case.results(result), case.results(case.again[1]), strict=True):
        if declared.alias_info is None and made.numel() and _is_same_buffer(made, second):
            yield f"{name} of two calls is in the same memory: a write to one changes the other. Return a copy"


def _is_same_buffer(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _determinism(case: Case) -> Iterator[str]:
    after, result = case.plain
    again, second = case.again
    advice = (
        "It draws from something else than PyTorch's generator of the device"
        if case.is_random
        else "If it draws random numbers, declare it with tags=torch.Tag.nondeterministic_seeded"
    )
    pairs = [*zip(case.results(result), case.results(second), strict=True)]
    pairs += [*zip(case.tensors(after), case.tensors(again), strict=True)]
    for (name, _, one), (_, _, other) in pairs:
        if one.shape != other.shape or not same_bytes(one, other):
            yield f"two calls with the same arguments give different values for {name}. {advice}"


def _abstract(case: Case) -> Iterator[str]:
    from torch._subclasses.fake_tensor import (
        FakeTensorMode,  # the modes of fake tensors: checked on torch 2.13
    )
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    _, result = case.plain
    if "factory" in case.op._impls:
        return
    if not has_abstract(case.op._qualname):
        yield (
            "there is none. Register one with impl_abstract: without it, tarry runs the operator at once instead of "
            "recording it, and torch.compile and torch.export refuse it"
        )
        return
    mode = FakeTensorMode(shape_env=ShapeEnv())
    values = case.copies(lambda tensor: mode.from_tensor(tensor, static_shapes=True))
    with mode, torch.no_grad():
        promised = case.call(values)
    real, fake = list(case.results(result)), list(case.results(promised))
    if len(real) != len(fake):
        yield f"it promises {len(fake)} tensors, and there are {len(real)}"
        return
    for (name, _, made), (_, _, promise) in zip(real, fake, strict=True):
        yield from difference(name, made, promise, "promised", "made")


def _device(case: Case) -> Iterator[str]:
    """Results are where the arguments are. An abstract implementation that forgets it is right on the CPU only."""
    asked = any(isinstance(value, torch.device) for value in case.values)
    if asked or not list(case.tensors(case.values)):
        return
    values = case.copies(lambda tensor: tensor.to("meta"))
    try:
        with torch.no_grad():
            promised = case.call(values)
    except Exception:  # a size that depends on data; anything else has been reported
        return
    for name, _, made in case.results(promised):
        if not made.is_meta:
            advice = "Write x.new_empty(...), or device=x.device"
            yield f"{name} is on {made.device} whatever the device of the arguments. {advice}"


def _recorded(case: Case) -> Iterator[str]:
    """Called on tarry, it must be one node, and give what it gives in eager."""
    if not _is_at_home(case):
        return
    after, result = case.plain
    values = case.copies(lambda tensor: tensor.to("tarry"))
    with torch.no_grad():
        recorded = case.call(values)
    if case.is_random:
        return  # tarry draws a seed of its own for each node
    pairs = [*zip(case.results(result), case.results(recorded), strict=True)]
    for (name, _, made), (_, _, lazy) in pairs:
        yield from difference(name, lazy, made, "called", "recorded", device=False)
    # Of arguments only the values: tarry may hold them with other strides.
    pairs += [*zip(case.tensors(after), case.tensors(values), strict=True)]
    for (name, _, made), (_, _, lazy) in pairs:
        if lazy.shape == made.shape and lazy.dtype == made.dtype and not _close(lazy.to(made.device), made):
            yield f"{name} has other values when recorded on tarry than when called"


def _recorded_gradient(case: Case) -> Iterator[str]:
    if not case.gradient_at or case.is_random or not _is_at_home(case):
        return
    eager = gradients(case.copies(), case.values, case.differentiated)
    lazy = gradients(case.copies(lambda tensor: tensor.to("tarry")), case.values, case.differentiated)
    for (name, expected), (_, found) in zip(eager, lazy, strict=True):
        if (expected is None) != (found is None) or (
            expected is not None and found is not None and not _close(found.to(expected.device), expected)
        ):
            yield f"the gradient of {name} is another when recorded on tarry than when called"


def _lowerings(case: Case) -> Iterator[str]:
    """Each lowering computes what the kernel does, on every backend that is installed."""
    if case.is_random:
        return
    devices = {str(tensor.device) for _, _, tensor in case.tensors(case.values)}
    for name in lowering.lowered(case.op):
        if len(devices) != 1 or not _api.is_installed(name):
            continue
        with _api.using_backend(name, *devices), warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            faults = _faults(_recorded, case)
        unused = [str(warning.message) for warning in heard if case.op._qualname in str(warning.message)]
        yield from (f"for backend {name!r}, {fault}" for fault in [*faults, *unused])


def _is_at_home(case: Case) -> bool:
    """Whether tarry computes where the arguments are."""
    devices = {tensor.device.type for _, _, tensor in case.tensors(case.values)}
    return devices == {torch.device(_api.get_backend().fallback_device()).type}


_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-7, torch.complex128: 1e-7}
"""How far results may lie apart, relative to their size: other kernels add up in another order. Else 1e-4."""


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    tolerance = _TOLERANCES.get(one.dtype, 1e-4)
    return same_bytes(one, other) or (
        (one.is_floating_point() or one.is_complex())
        and torch.allclose(one, other, rtol=tolerance, atol=tolerance / 100, equal_nan=True)
    )


def _gradient(case: Case) -> Iterator[str]:
    if case.gradient_at:
        yield from check_gradients(case.gradient_at, case.copies(), case.values, case.differentiated)
        yield from check_incoming(case.gradient_at, case.copies(), case.values, case.differentiated)


CHECKS: dict[str, Callable[[Case], Iterator[str]]] = {
    "mutation": _mutation,
    "aliasing": _aliasing,
    "determinism": _determinism,
    "abstract implementation": _abstract,
    "device": _device,
    "gradient": _gradient,
    "recorded": _recorded,
    "recorded gradient": _recorded_gradient,
    "lowering": _lowerings,
}
