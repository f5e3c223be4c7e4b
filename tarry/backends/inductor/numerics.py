"""Inductor made to compute what eager PyTorch computes, up to rounding.

A program takes over in the middle of a training run, so a difference from eager shows there as a jump. Where
Inductor's arithmetic differs by more than the rounding of an operator's result, it is mended in one of four ways:

- **Settings**: values of float16 and bfloat16 are rounded where eager rounds them (`emulate_precision_casts`), also if
  two operators become one kernel: 1.001 through bfloat16 is 1, and a product that overflows float16 is infinite.
- **Compiler flags**: zeros have signs.
- **Decompositions** in eager's order of operations: fused with their neighbours as before.
- **Whole operators** (`exact`): calls of eager's own kernel. All that can raise is among them: a division of integers
  by zero is an error in eager, and the end of the process in a kernel of Inductor's.

`python -m tests.ops.numerics` compares all of it with eager. What still differs is listed in docs/compiling.md.

Private names used, checked on torch 2.11 and 2.13: the setting `emulate_precision_casts`, and
`cpp_builder._get_ffast_math_flags`. Where one is missing, nothing is changed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tarry.backends.fx.opaque import exact

aten = torch.ops.aten
Decomposition = Callable[..., Any]
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def as_eager_rounds() -> dict[str, Any]:
    """Settings of `torch._inductor.config`, those that this version has."""
    from torch._inductor import config

    return {name: True for name in ("emulate_precision_casts",) if hasattr(config, name)}


@contextlib.contextmanager
def signed_zeros() -> Iterator[None]:
    """Within the block, kernels for a CPU are compiled with signed zeros. Inductor's flags let the C++ compiler turn
    `x + 0.0` into `x`, which is another value for -0.0. The flags are part of the key of compiled kernels."""
    from torch._inductor import cpp_builder

    original = getattr(cpp_builder, "_get_ffast_math_flags", None)
    if original is None:
        yield
        return
    cpp_builder._get_ffast_math_flags = lambda: [*original(), "fsigned-zeros"]
    try:
        yield
    finally:
        cpp_builder._get_ffast_math_flags = original


def decompositions() -> dict[Any, Decomposition]:
    """Inductor's table of decompositions with the ones below. Those return NotImplemented where Inductor's own way is
    right."""
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    for overload, function in _OWN.items():
        table[overload] = _either(function, table.get(overload))
    return table


def _either(ours: Decomposition, theirs: Decomposition | None) -> Decomposition:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        made = ours(*args, **kwargs)
        return theirs(*args, **kwargs) if made is NotImplemented and theirs is not None else made

    return decomposed


_OWN: dict[Any, Decomposition] = {}


def _for(*overloads: Any) -> Callable[[Decomposition], Decomposition]:
    def register(function: Decomposition) -> Decomposition:
        for overload in overloads:
            _OWN[overload] = function
        return function

    return register


# ---- what kind of call it is


def _dtype(*args: Any) -> torch.dtype:
    """The type in which a call computes."""
    first, *rest = args
    dtype = torch.result_type(first, rest[0]) if rest else first.dtype
    for other in rest[1:]:
        dtype = torch.promote_types(dtype, torch.result_type(first, other))
    return dtype


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _on_cpu(*args: Any) -> bool:
    return all(arg.device.type == "cpu" for arg in args if isinstance(arg, Tensor))


def _operands(*args: Any) -> tuple[torch.dtype, list[Any]]:
    """The type of a call's result, and the arguments as tensors of the type in which eager computes: float32 for
    float16 and bfloat16, to which a number is rounded before."""
    dtype = _dtype(*args)
    computed = torch.float32 if dtype in _LOW_PRECISION else dtype
    device = next(arg.device for arg in args if isinstance(arg, Tensor))

    def taken(arg: Any) -> Tensor:
        if isinstance(arg, Tensor):
            return arg.to(dtype).to(computed)
        if dtype in _LOW_PRECISION:
            arg = torch.tensor(arg, dtype=torch.float64, device="cpu").to(dtype)
            arg = float(arg.constant) if hasattr(arg, "constant") else float(arg)
        return torch.scalar_tensor(arg, dtype=computed, device=device)

    return dtype, [taken(arg) for arg in args]


# ---- division: by way of the remainder, where Inductor takes `floor(a / b)`; of integers, with a check


def _divides(op: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    if _is_integral(_dtype(a, b)):
        if not _on_cpu(a, b):
            return NotImplemented  # nothing is checked on a GPU
        if not isinstance(b, Tensor) and b not in (0, -1):  # the least integer by -1 overflows
            return NotImplemented
    return exact(op)(a, b, **kwargs)


@_for(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(a: Any, b: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode is None:
        return NotImplemented
    op = aten.div.Tensor_mode if isinstance(b, Tensor) else aten.div.Scalar_mode
    return _divides(op, a, b, rounding_mode=rounding_mode)


for _op in (
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.remainder.Tensor,
    aten.remainder.Scalar,
    aten.remainder.Scalar_Tensor,
    aten.fmod.Tensor,
    aten.fmod.Scalar,
):
    _OWN[_op] = functools.partial(_divides, _op)


# ---- powers


@_for(aten.pow.Tensor_Scalar)
def _pow(x: Tensor, exponent: Any) -> Any:
    if _is_integral(_dtype(x, exponent)) and exponent < 0:
        return exact(aten.pow.Tensor_Scalar)(x, exponent)  # which raises
    if not x.is_floating_point() or isinstance(exponent, complex) or not _on_cpu(x):
        return NotImplemented
    if exponent == -2:  # Inductor squares the reciprocal, which does not overflow where the square does
        (value,) = _operands(x)[1]
        return (value * value).reciprocal().to(x.dtype)
    if x.dtype == torch.float16 and exponent == 0.5:  # (-inf) ** 0.5 is inf, its square root is not
        return torch.pow(x, torch.full_like(x, 0.5))
    return NotImplemented


@_for(aten.pow.Scalar)
def _power_of(base: Any, x: Tensor) -> Any:
    if _dtype(x, base) not in _LOW_PRECISION:
        return NotImplemented
    dtype, (x, rounded) = _operands(x, base)
    return torch.pow(rounded, x).to(dtype)


# ---- products


@_for(aten.mul.Tensor, aten.mul.Scalar)
def _mul(a: Any, b: Any) -> Any:
    """Inductor takes a product with the whole number 0 for zeros, whatever the other is: NaN and infinity are lost."""
    zero = [isinstance(arg, int) and arg == 0 for arg in (a, b)]
    if not any(zero) or _is_integral(_dtype(*((b, a) if zero[0] else (a, b)))):
        return NotImplemented
    return aten.mul.Tensor(b, 0.0) if zero[0] else aten.mul.Tensor(a, 0.0)


# ---- sums of products, in the order of the kernels for a CPU


@_for(aten.addcmul.default)
def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Any:
    if not _on_cpu(x, a, b) or value == 1 or x.is_complex():
        return NotImplemented
    dtype, (x, a, b) = _operands(x, a, b)
    return (x + a * value * b).to(dtype)


@_for(aten.addcdiv.default)
def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Any:
    if not _on_cpu(x, a, b) or value == 1 or x.is_complex():
        return NotImplemented
    dtype, (x, a, b) = _operands(x, a, b)
    return (x + a * value / b).to(dtype)


# ---- bounds: of two zeros, eager takes the value and not the bound


@_for(aten.clamp.default)
def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    bounds = [bound for bound in (low, high) if bound is not None]
    dtype = _dtype(x, *bounds)
    if not dtype.is_floating_point or not _on_cpu(x):
        return NotImplemented
    _, (value, *numbers) = _operands(x, *bounds)
    for take, number in zip([torch.maximum] * (low is not None) + [torch.minimum], numbers, strict=False):
        value = take(number, value)
    return value.to(dtype)


@_for(aten.clamp_min.default)
def _clamp_min(x: Tensor, low: Any) -> Any:
    return _clamp(x, low)


@_for(aten.clamp_max.default)
def _clamp_max(x: Tensor, high: Any) -> Any:
    return _clamp(x, None, high)


@_for(aten.hardtanh.default)
def _hardtanh(x: Tensor, low: Any = -1, high: Any = 1) -> Any:
    return _clamp(x, low, high) if x.is_floating_point() else NotImplemented  # its result is of the type of x


# ---- functions


@_for(aten.expm1.default)
def _expm1(x: Tensor) -> Any:
    """Inductor's kernels for a CPU subtract one from the exponential: nothing is left of a small number."""
    if not x.is_floating_point() or not _on_cpu(x):
        return NotImplemented
    (value,) = _operands(x)[1]
    half = torch.tanh(value * 0.5)
    return torch.where(value.abs() < 1, 2 * half / (1 - half), value.exp() - 1).to(x.dtype)


@_for(aten.elu.default)
def _elu(x: Tensor, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    """With zero on the side of the positive numbers."""
    (value,) = _operands(x)[1]
    return torch.where(value < 0, torch.expm1(value * input_scale) * (alpha * scale), value * scale).to(x.dtype)


@_for(aten.round.decimals)
def _round(x: Tensor, *, decimals: int) -> Any:
    """Inductor's decomposition, with the intermediate results that eager has for low precision."""
    if x.dtype not in _LOW_PRECISION:
        return NotImplemented
    return torch.round(x.float(), decimals=decimals).to(x.dtype)


# ---- whole operators: what is neither often used nor right in Inductor's kernels for a CPU


def _whole(dtypes: Sequence[torch.dtype] | None, *overloads: Any) -> None:
    """Eager's own kernel for tensors of these types (None: all)."""

    def call(overload: Any, *args: Any, **kwargs: Any) -> Any:
        given = {arg.dtype for arg in args if isinstance(arg, Tensor)}
        wanted = _on_cpu(*args) and (dtypes is None or not given.isdisjoint(dtypes))
        return exact(overload)(*args, **kwargs) if wanted else NotImplemented

    for overload in overloads:
        _OWN[overload] = functools.partial(call, overload)


_whole(None, aten.acosh.default)  # overflows
_whole(None, aten.atanh.default)  # nothing is left of a small number
_whole(None, aten.nextafter.default)  # gives the neighbour in float32, whatever the type
_whole(None, aten.softshrink.default, aten.grid_sampler_2d.default)  # lose NaN, of the grid
_whole(None, aten.fmax.default, aten.fmin.default)  # take the other of two zeros
_whole(None, aten.ldexp.Tensor, aten.mvlgamma.default)  # are in eager made of operators whose results overflow
_whole(  # begin with zero instead of the least or the greatest number, in vectorised loops
    (torch.int8, torch.uint8),
    aten.amax.default,
    aten.amin.default,
    aten.max.default,
    aten.min.default,
    aten.argmax.default,
    aten.argmin.default,
)
_whole(  # lose NaN, which eager's complex multiplications make of infinities
    (torch.complex64, torch.complex128),
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.sgn.default,
    aten.logaddexp.default,
)
_whole(  # give booleans, which uint8 does not in eager
    (torch.uint8,),
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
)
