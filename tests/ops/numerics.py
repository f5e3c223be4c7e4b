"""Sweep of hostile values through the compiling backends: ``python -m tests.ops.numerics --backend inductor``.

Every pointwise, binary and reducing operator of PyTorch's OpInfo database, and chains of them that compilers like to
rewrite (casts there and back, a product before a sum, an optimizer's update), on values where a compiler's arithmetic
may differ from eager's by more than rounding: zeros of both signs, infinities, NaN, denormals, the ends of each type,
zero divisors, negative exponents, products that overflow on the way. Expected is what eager PyTorch gives on the CPU:
integers and logic exactly, NaN and infinities and signs of zeros in the same places, other numbers up to rounding,
and an error of the same type where eager raises one.

Many calls share one graph, since a compile takes seconds; calls that raise have a graph each. Groups of calls run in
child processes: a division by zero in compiled code ends the process.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.pool import run_pool

Call = Callable[..., Any]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)


# ---- values


def specials(dtype: torch.dtype) -> list[Any]:
    """Values at which arithmetic of a type goes wrong first."""
    if dtype == torch.bool:
        return [False, True]
    if dtype.is_complex:
        parts = [0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan]
        return [complex(a, b) for a, b in itertools.product(parts, parts)]
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        found = [0, 1, 2, 3, 7, 100, info.max, info.max - 1]
        return found + ([-1, -2, -3, -7, -100, info.min + 1] if info.min < 0 else [128, 255])
    info = torch.finfo(dtype)
    root = math.sqrt(info.max)
    found = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 1.001, 3.14159, 100.0, root * 0.9, root * 1.1, info.max]
    found += [info.tiny, info.tiny / 4, 1e-4, math.inf]
    return [*found, *[-value for value in found], math.nan]


def vector(dtype: torch.dtype) -> Tensor:
    """The special values, some vectors of a processor's registers long and a few elements more."""
    values = specials(dtype)
    return torch.tensor((values * (70 // len(values) + 1))[: max(70, len(values))]).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every special value with every other one."""
    values = torch.tensor(specials(dtype)).to(dtype)
    return values.repeat_interleave(len(values)), values.repeat(len(values))


def rows(dtype: torch.dtype) -> Tensor:
    """Rows for reductions: a result may not depend on the order in which they are summed up."""
    if dtype == torch.bool:
        return torch.tensor([[False] * 37, [True] * 37, [False, True, *[False] * 35]])
    if not (dtype.is_floating_point or dtype.is_complex):
        info = torch.iinfo(dtype)
        few = (torch.arange(37) % 5 - (2 if info.min < 0 else 0)).to(dtype)
        return torch.stack([few, *[torch.full((37,), value, dtype=dtype) for value in (info.max, info.min, 0)]])
    real = torch.float64 if dtype.is_complex else dtype
    top = 1e30 if dtype.is_complex else torch.finfo(dtype).max
    plain = torch.linspace(0.5, 2, 37).to(real)
    made = [plain, -plain, torch.zeros(37), -torch.zeros(37)]
    made += [plain.index_fill(0, torch.tensor([35]), special) for special in (math.nan, math.inf, -math.inf)]
    made.append(made[-1].index_fill(0, torch.tensor([3]), math.inf))  # both infinities
    made += [torch.full((37,), top / 2, dtype=real), plain * (top * 1e-3)]  # sums overflow
    return torch.stack([row.to(real) for row in made]).to(dtype)


# ---- calls


@dataclass(frozen=True)
class Case:
    """A call on tensors, with a name to report it by."""

    name: str
    call: Call
    inputs: tuple[Any, ...]
    ulps: float = 16  # what counts as rounding; vectorised functions differ from the C library's by a few
    sums: bool = False  # may cancel: what counts is rounding of the elements, and of those that they are summed with
    size: float = 0  # of what it is computed from, if that is added up

    def run(self, device: str) -> list[Tensor]:
        moved = [item.to(device, copy=True) if isinstance(item, Tensor) else item for item in self.inputs]
        made = self.call(*moved)
        return [item for item in (made if isinstance(made, tuple | list) else (made,)) if isinstance(item, Tensor)]


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_LEFT_OUT = {
    "nn.functional.dropout": "random",
    "nn.functional.rrelu": "random",
    "bernoulli": "random",
    "exponential": "random",
    "normal": "random",
    "cauchy": "random",
    "geometric": "random",
    "nn.functional.prelu": "its sample's weight would stay on the CPU",
    "nn.functional.gelu": "of infinity, eager's own kernels give NaN or infinity, depending on the place",
    "char": "what becomes of a number out of range is not defined",
    "byte": "what becomes of a number out of range is not defined",
    "short": "what becomes of a number out of range is not defined",
    "int": "what becomes of a number out of range is not defined",
    "long": "what becomes of a number out of range is not defined",
    "masked.logsumexp": "its result for integers is a number out of range, cast",
}
_SERIES = (
    "bessel",
    "chebyshev",
    "hermite",
    "laguerre",
    "legendre",
    "zeta",
    "polygamma",
    "jiterator",
    "log_ndtr",
    "igamma",
)
# No two implementations agree near the ends of their range.
_NEAR_ONE = {"erf", "erfc", "special.ndtr"}  # made from numbers near one, by eager or by the compiler


def database_cases(dtype: torch.dtype, pattern: str = "") -> Iterator[Case]:
    """The operators of the database that work element by element or reduce, on the special values."""
    import re

    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

    from tests.ops.check import full_name

    x, (a, b), r = vector(dtype), pairs(dtype), rows(dtype)
    for op in op_db:
        name = full_name(op)
        if dtype not in op.dtypes or name in _LEFT_OUT or any(word in name for word in _SERIES):
            continue
        if not re.search(pattern, name):
            continue
        label = f"{name} {_named(dtype)}"
        if isinstance(op, UnaryUfuncInfo):
            kwargs = op.sample_kwargs("cpu", dtype, x)[0]
            yield Case(label, _bound(op.op, kwargs), (x,), size=float(name in _NEAR_ONE))
        elif isinstance(op, BinaryUfuncInfo):
            if dtype in (*INTEGERS,) and any(word in name for word in ("div", "remainder", "fmod", "pow")):
                keep = (b > 0) & (b < 10)
                yield Case(label, op.op, (a[keep], b[keep]))
                yield Case(f"{label} signs", op.op, (a[b != 0][:32], b[b != 0][:32]))
                yield Case(f"{label} zero", op.op, (a, torch.zeros_like(b)))
                yield Case(f"{label} minus one", op.op, (a, torch.full_like(b, -1)))
            else:
                yield Case(label, op.op, (a, b))
            if not dtype.is_complex and dtype != torch.bool:
                yield Case(f"{label} promoted", op.op, (x, torch.tensor(3, dtype=torch.int64).expand(x.shape).clone()))
        elif isinstance(op, ReductionOpInfo):
            # Inductor's variances overflow where the sum does: see docs/compiling.md.
            given = r[:-2] if dtype.is_floating_point and ("var" in name or "std" in name) else r
            yield Case(f"{label} rows", _bound(op.op, {"dim": 1}), (given,), ulps=64)
            yield Case(f"{label} columns", _bound(op.op, {"dim": 0}), (given,), ulps=64)


def _bound(call: Call, kwargs: dict[str, Any]) -> Call:
    return lambda *args: call(*args, **kwargs)


def numbers_for(dtype: torch.dtype) -> list[Any]:
    if dtype.is_floating_point:
        return [2.0, 0.1, -0.0, 0.0, 1e-5, -1.5, 1e30, math.inf, math.nan]
    return [2, 3, 1, 7, -1, 0]


_WITH_NUMBER: dict[str, Call] = {
    "add": lambda x, n: torch.add(x, n),
    "add alpha": lambda x, n: torch.add(x, x / 8, alpha=n),
    "sub alpha": lambda x, n: torch.sub(x, x.flip(0), alpha=n),
    "rsub": lambda x, n: torch.rsub(x, n),
    "mul": lambda x, n: torch.mul(x, n),
    "div": lambda x, n: torch.div(x, n),
    "rdiv": lambda x, n: n / x,
    "div floor": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "div trunc": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "remainder": lambda x, n: torch.remainder(x, n),
    "fmod": lambda x, n: torch.fmod(x, n),
    "pow": lambda x, n: torch.pow(x, n),
    "rpow": lambda x, n: torch.pow(n, x),
    "clamp_min": lambda x, n: torch.clamp(x, min=n),
    "clamp_max": lambda x, n: torch.clamp(x, max=n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x.flip(0), value=n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x, x.flip(0), value=n),
    "lerp": lambda x, n: torch.lerp(x, x.flip(0), n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "full_like": lambda x, n: torch.full_like(x, n),
    "fill_": lambda x, n: x.fill_(n),
    "eq": lambda x, n: torch.eq(x, n),
    "lt": lambda x, n: torch.lt(x, n),
    "where": lambda x, n: torch.where(x > 0, x, n),
    "threshold": lambda x, n: torch.nn.functional.threshold(x, n, n),
    "leaky_relu": lambda x, n: torch.nn.functional.leaky_relu(x, n),
    "elu": lambda x, n: torch.nn.functional.elu(x, n),
    "softplus": lambda x, n: torch.nn.functional.softplus(x, n),
    "hardtanh": lambda x, n: torch.nn.functional.hardtanh(x, -abs(n), abs(n)),
    "addmm beta": lambda x, n: torch.addmm(x[:4].view(2, 2), x[:4].view(2, 2), x[4:8].view(2, 2), beta=n),
}


def number_cases(dtype: torch.dtype, number: Any) -> Iterator[Case]:
    """Operators with a Python number. The same calls come again with other numbers, which are inputs from then on."""
    x = vector(dtype)
    if dtype.is_floating_point:
        x = torch.cat([x, torch.tensor([0.1, 1e-5]).to(dtype)])  # equal to numbers below, once those are rounded
    for name, call in _WITH_NUMBER.items():
        yield Case(f"{name} {_named(dtype)} {number}", call, (x, number), sums=True)


_CHAINS: dict[str, Call] = {
    "through float16": lambda x: x.half().to(x.dtype),
    "through bfloat16": lambda x: x.bfloat16().to(x.dtype),
    "through float32": lambda x: x.float().to(x.dtype),
    "through float64": lambda x: x.double().to(x.dtype),
    "through int64": lambda x: x.clamp(-100, 100).nan_to_num().long().to(x.dtype),
    "half overflow": lambda x: (x.half() * 60000).float() / 60000,
    "bfloat16 sum": lambda x: (x.bfloat16() + 1.0).float() - 1.0,
    "half sum": lambda x: (x.half() + 1.0).float() - 1.0,
    "half twice": lambda x: (x.half() * x.half()) * x.half(),
    "bfloat16 exp log": lambda x: x.bfloat16().exp().log(),
    "half square root": lambda x: (x.half() ** 2).sqrt(),
    "product and sum": lambda x: x * x.flip(0) + x,
    "product and difference": lambda x: x * x - x * x,
    "product minus itself": lambda x: x * 1.001 - x * 1.001,
    "plus zero": lambda x: (x + 0.0, x - 0.0, 0.0 - x, -x, x * 1.0, x * 0.0, x * -1.0, 0.0 + x),
    "whole numbers": lambda x: (x * 0, 0 * x, x + 0, x * 1, x - 0, 0 - x, x / 1, x**0, x**1, 0 / x, 1 / x),
    "zeros and ones": lambda x: (x + torch.zeros_like(x), x * torch.ones_like(x), x * torch.zeros_like(x)),
    "minus itself": lambda x: (x - x, x / x),
    "division twice": lambda x: x / 3.0 / 7.0,
    "reciprocal": lambda x: (1.0 / x, x.reciprocal(), 1.0 / (1.0 / x)),
    "add then subtract": lambda x: (x + 1e10) - 1e10,
    "floor division": lambda x: (x // 0.1, x % 0.1, x // -0.0, x // x.flip(0)),
    "absolute": lambda x: (x.abs(), -x.abs(), x.sign(), x.sgn(), x.signbit(), torch.copysign(x.abs(), x)),
    "maximum of zeros": lambda x: (torch.maximum(x, -x), torch.minimum(x, -x), torch.fmax(x, -x), x.relu(), x.clamp(0)),
    "rounding": lambda x: (x.round(), x.floor(), x.ceil(), x.trunc(), x.frac(), x.round(decimals=1)),
    "where": lambda x: torch.where(x > 0, x.sqrt(), -x),
    "hypotenuse": lambda x: (x * x + x.flip(0) * x.flip(0)).sqrt(),
    "square": lambda x: (x**2, x.square(), x**3, x**-1, x**0.5, x**-2.0, x**0.0),
    "sigmoids": lambda x: (x.sigmoid(), torch.nn.functional.silu(x), x.tanh(), x.erf()),
    "softmax": lambda x: (x.clamp(-1e4, 1e4).nan_to_num().softmax(0), x.clamp(-1e4, 1e4).nan_to_num().log_softmax(0)),
    "addcmul": lambda x: (torch.addcmul(x, x, x), torch.addcmul(x, x, x, value=1e-5), x.addcmul(x, x, value=0.5)),
    "addcdiv": lambda x: (torch.addcdiv(x, x, x.flip(0)), torch.addcdiv(x, x, x, value=1e-5)),
    "lerp": lambda x: (torch.lerp(x, x.flip(0), 0.1), torch.lerp(x, x.flip(0), 0.9), torch.lerp(x, x.flip(0), x)),
    "comparisons": lambda x: (x == x.flip(0), x != x, x <= x.flip(0), x.isnan(), x.isinf(), x > 0.0),
    "to integers": lambda x: tuple(x.nan_to_num().clamp(-120, 120).to(d) for d in INTEGERS[:4]),
    "prefix sums": lambda x: (x.clamp(-1e4, 1e4).cumsum(0), x.clamp(-1.5, 1.5).cumprod(0), x.cummax(0)[0]),
}  # fmt: skip


def chain_cases(dtype: torch.dtype) -> Iterator[Case]:
    for name, call in _CHAINS.items():
        yield Case(f"chain: {name} {_named(dtype)}", call, (vector(dtype),), sums=True)


_INTEGER_CHAINS: dict[str, Call] = {
    "wrap around": lambda x: (x + x, x * x, x - 1, -x, x * 3 + 1),
    "shifts": lambda x: (x << 1, x >> 1, x << (x & 3), x >> (x & 3)),
    "there and back": lambda x: tuple(x.to(d).to(x.dtype) for d in (*INTEGERS, *FLOATS)),
    "true division": lambda x: (x / 3, x / x.flip(0), x / 0),
    "by a constant": lambda x: (x // 3, x % 3, torch.div(x, 3, rounding_mode="trunc"), torch.fmod(x, 3), x**3),
    "bits": lambda x: (x & 3, x | 4, x ^ 5, ~x),
    "mean": lambda x: (x.sum(), x.prod(), x.float().mean(), x.max(), x.min()),
    "mixed": lambda x: (x + 0.5, x * 1.5, x - x.float(), x.double() * x),
}


def integer_chain_cases(dtype: torch.dtype) -> Iterator[Case]:
    for name, call in _INTEGER_CHAINS.items():
        yield Case(f"chain: {name} {_named(dtype)}", call, (vector(dtype),))


def optimizer_cases() -> Iterator[Case]:
    """A few updates with gradients that are tiny, huge, or none of both."""
    gradients = torch.tensor([0.0, -0.0, 1e-30, 1e-20, 1e-8, 1.0, -3.0, 1e10, 2e19, -2e19, 1e25, 3e38] * 3)

    def updates(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> Call:
        def call(gradient: Tensor) -> list[Tensor]:
            p = torch.nn.Parameter(torch.linspace(-1, 1, len(gradient), dtype=dtype).to(gradient.device))
            optimizer = make([p])
            for k in range(3):
                p.grad = (gradient * (k + 1)).to(dtype)
                optimizer.step()
            return [p.detach(), *[v for v in optimizer.state[p].values() if isinstance(v, Tensor) and v.dim()]]

        return call

    made: dict[str, Callable[..., torch.optim.Optimizer]] = {}
    for foreach in (False, True):
        how = "foreach" if foreach else "single"
        made |= {
            f"Adam {how}": lambda p, f=foreach: torch.optim.Adam(p, 0.1, foreach=f),
            f"AdamW amsgrad {how}": lambda p, f=foreach: torch.optim.AdamW(p, 0.1, amsgrad=True, foreach=f),
            f"SGD {how}": lambda p, f=foreach: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=f),
            f"RMSprop {how}": lambda p, f=foreach: torch.optim.RMSprop(p, 0.1, momentum=0.5, foreach=f),
            f"Adagrad {how}": lambda p, f=foreach: torch.optim.Adagrad(p, 0.1, foreach=f),
            f"Adamax {how}": lambda p, f=foreach: torch.optim.Adamax(p, 0.1, foreach=f),
            f"NAdam {how}": lambda p, f=foreach: torch.optim.NAdam(p, 0.1, foreach=f),
            f"Adadelta {how}": lambda p, f=foreach: torch.optim.Adadelta(p, 0.1, foreach=f),
        }
    for name, make in made.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            # Updates amplify a difference in the last place by a cancellation or two.
            yield Case(f"{name} {_named(dtype)}", updates(make, dtype), (gradients,), ulps=4096)


# ---- comparison


def difference(got: Tensor, want: Tensor, ulps: float, around: Tensor | None = None) -> str | None:
    """How two results differ by more than rounding; None if they do not. `around`: the size of what was added up, where
    the sum may be much smaller."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype}{tuple(got.shape)} instead of {want.dtype}{tuple(want.shape)}"
    if want.is_complex():
        return difference(torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj()), ulps)
    if not want.is_floating_point():
        return _first(got != want, got, want, "another integer")
    kinds = (
        (got.isnan() != want.isnan(), "NaN in one"),
        ((got.isinf() | want.isinf()) & (got != want) & ~want.isnan(), "infinite in one"),
        ((got == 0) & (want == 0) & (got.signbit() != want.signbit()), "another sign of zero"),
    )
    for wrong, kind in kinds:
        found = _first(wrong, got, want, kind)
        if found:
            return found
    info = torch.finfo(want.dtype)
    finite = want.isfinite()
    g, w = got[finite].double(), want[finite].double()
    allowed = ulps * info.eps * w.abs() + 4 * info.tiny * info.eps
    if around is not None and around.shape == want.shape:
        allowed += 4 * info.eps * around[finite].double()
    return _first((g - w).abs() > allowed, got[finite], want[finite], "another value")


def _first(wrong: Tensor, got: Tensor, want: Tensor, kind: str) -> str | None:
    if not wrong.any():
        return None
    where = wrong.flatten().nonzero()[0]
    return (
        f"{kind}: {got.flatten()[where].item()!r} instead of {want.flatten()[where].item()!r}"
        f" at {int(where)} ({int(wrong.sum())} of {wrong.numel()})"
    )


# ---- running


@dataclass
class Expected:
    """What eager does: results, or an error."""

    results: list[Tensor] | None
    error: Exception | None = None


def expect(case: Case) -> Expected:
    try:
        return Expected(case.run("cpu"))
    except Exception as error:
        return Expected(None, error)


def run_together(cases: Sequence[Case]) -> Iterator[tuple[Case, str]]:
    """Run calls as one graph, those that raise as one each; yields those that differ from eager, and how."""
    import tarry

    expected = [(case, expect(case)) for case in cases]
    quiet = [(case, want) for case, want in expected if want.error is None]
    recorded: list[tuple[Case, Expected, list[Tensor]]] = []
    for case, want in quiet:
        try:
            recorded.append((case, want, case.run("tarry")))
        except Exception as error:
            yield case, f"raises {type(error).__name__}: {_line(error)}"
    try:
        tarry.mark_step()
    except Exception as error:
        yield Case(f"{recorded[0][0].name} and others", lambda: None, ()), _line(error)
    for case, want, made in recorded:
        try:
            got = [item.cpu() for item in made]
        except Exception as error:
            yield case, f"raises {type(error).__name__}: {_line(error)}"
            continue
        assert want.results is not None
        for index, (g, w) in enumerate(zip(got, want.results, strict=True)):
            size = case.inputs[0].double().abs().nan_to_num(0, 0) if case.sums else None
            around = torch.full(w.shape, case.size) if size is None else size + size.flip(0)
            found = difference(g, w, case.ulps, around)
            if found:
                yield case, f"result {index}: {found}"
                break
    del recorded
    for case, want in expected:
        if want.error is None:
            continue
        try:
            [item.cpu() for item in case.run("tarry")]
        except Exception as error:
            kinds = (RuntimeError, NotImplementedError)  # what has no kernel may be refused by a check before it
            if not isinstance(error, type(want.error)) and not (type(error) in kinds and type(want.error) in kinds):
                yield case, f"raises {type(error).__name__}: {_line(error)} instead of {type(want.error).__name__}"
        else:
            yield case, f"does not raise {type(want.error).__name__}: {_line(want.error)}"


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:150]


def groups(dtypes: Sequence[torch.dtype], pattern: str) -> dict[str, list[Case]]:
    """All cases by the graph that they share."""
    found: dict[str, list[Case]] = {}

    def add(label: str, cases: Iterator[Case], size: int = 24) -> None:
        wanted = list(cases)
        for start in range(0, len(wanted), size):
            found[f"{label} {start // size}"] = wanted[start : start + size]

    for dtype in dtypes:
        name = _named(dtype)
        add(f"database {name}", database_cases(dtype, pattern))
        if pattern:
            continue
        if dtype in FLOATS:
            add(f"chains {name}", chain_cases(dtype))
        elif dtype in INTEGERS:
            add(f"chains {name}", integer_chain_cases(dtype))
        if dtype in FLOATS or dtype in INTEGERS:
            found[f"numbers {name}"] = []
    if torch.float32 in dtypes and not pattern:
        add("optimizers", optimizer_cases())
    return found


def _setup(backend: str, dtypes: list[str], pattern: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import tarry

    tarry.set_backend(backend, compile="wait")
    _groups.update(groups([getattr(torch, name) for name in dtypes], pattern))


_groups: dict[str, list[Case]] = {}


def _work(task: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if task.startswith("numbers "):
        dtype = getattr(torch, task.removeprefix("numbers "))
        for number in numbers_for(dtype):
            found += [(case.name, text) for case, text in run_together(list(number_cases(dtype, number)))]
        return found
    return [(case.name, text) for case, text in run_together(_groups[task])]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.numerics", description=__doc__)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--dtypes", default=",".join(map(_named, DTYPES)))
    parser.add_argument("--ops", default="", help="regular expression searched in the operator's name")
    parser.add_argument("--groups", default="", help="run groups that have this in their name")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one graph")
    options = parser.parse_args(argv)
    names = options.dtypes.split(",")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tasks = [t for t in groups([getattr(torch, n) for n in names], options.ops) if options.groups in t]
    start, wrong = time.monotonic(), 0
    arguments = (options.backend, names, options.ops)
    for done in run_pool(tasks, _work, setup=_setup, setup_args=arguments, jobs=options.jobs, timeout=options.timeout):
        if done.crash:
            wrong += 1
            print(f"{done.task}: {done.crash.splitlines()[0]}", flush=True)
        for name, text in done.value or ():
            wrong += 1
            print(f"{name}: {text}", flush=True)
        print(f"[{done.task}: {done.seconds:.0f} s]", file=sys.stderr, flush=True)
    print(f"{wrong} differences in {len(tasks)} graphs, {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
