"""Writing operators become pure ones: by exact text, and for many operators by bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tarry.ir import parse, to_text, verify
from tarry.passes import functionalize
from tests.passes.check import body, check_stages, kept_operators, record

HEADER = "graph(%0: f32[4, 8], %1: f32[8], %2: f64[8], %3: bf16[4, 8], %4: f32[4, 8]{1, 4}, %5: i32[8]):"


def functional(line: str, outputs: str = "%6") -> list[str]:
    graph = functionalize(parse(f"{HEADER}\n  {line}\n  return {outputs}"))
    verify(graph, "functional", thorough=True)
    return body(graph)


CASES: list[tuple[str, list[str]]] = [
    ("%6: f32[4, 8] = aten::add_.Tensor(%0, %1, alpha=1)", ["aten::add.Tensor(%0, %1, alpha=1)"]),
    ("%6: f32[4, 8] = aten::zero_(%0)", ["aten::full([4, 8], 0.0, dtype=f32, device=here)"]),
    ("%6: i32[8] = aten::zero_(%5)", ["aten::full([8], 0, dtype=i32, device=here)"]),
    (
        "%6: f32[4, 8]{1, 4} = aten::fill_.Scalar(%4, $0=2)",
        ["aten::full([8, 4], $0=2, dtype=f32, device=here)", "aten::permute(%6, [1, 0])"],
    ),
    (
        "%6: f32[8] = aten::fill_.Tensor(%1, $0=wrapped(2.0))",
        ["aten::full([8], $0=wrapped(2.0), dtype=f32, device=here)"],
    ),
    # A copy of the same type is the source itself.
    ("%6: f32[8] = aten::copy_(%1, %1, False)", []),
    (
        "%6: bf16[4, 8] = aten::copy_(%3, %1, False)",
        ["aten::expand(%1, [4, 8], implicit=False)", "aten::_to_copy(%6, dtype=bf16, non_blocking=False)"],
    ),
    # What is written keeps its dtype and its strides.
    (
        "%6: bf16[4, 8] = aten::mul_.Tensor(%3, %0)",
        ["aten::mul.Tensor(%3, %0)", "aten::_to_copy(%6, dtype=bf16, non_blocking=False)"],
    ),
    (
        "%6: f32[8] = aten::add_.Tensor(%1, %2, alpha=1)",
        ["aten::add.Tensor(%1, %2, alpha=1)", "aten::_to_copy(%6, dtype=f32, non_blocking=False)"],
    ),
    (
        "%6: f32[8] = aten::eq_.Tensor(%1, %2)",
        ["aten::eq.Tensor(%1, %2)", "aten::_to_copy(%6, dtype=f32, non_blocking=False)"],
    ),
    (
        "%6: f32[4, 8]{1, 4} = aten::add.out(%0, %1, alpha=1, out=%4)",
        [
            "aten::add.Tensor(%0, %1, alpha=1)",
            "aten::permute(%6, [1, 0])",
            "aten::clone(%7, memory_format=contiguous_format)",
            "aten::permute(%8, [1, 0])",
        ],
    ),
    # An accumulation happens in the dtype of what it is written to.
    (
        "%6: f64[8] = aten::sum.IntList_out(%0, [0], False, out=%2)",
        ["aten::sum.dim_IntList(%0, [0], False, dtype=f64)"],
    ),
    ("%6: i32[8] = aten::cumsum_(%5, 0)", ["aten::cumsum(%5, 0, dtype=i32)"]),
    (
        "%6: f32[8] = aten::arange.start_out($0=0, $1=8, $2=1, out=%1)",
        ["aten::arange.start_step($0=0, $1=8, $2=1, dtype=f32, device=here)"],
    ),
    (
        "(%6: f32[4, 8], %7: f32[8]) = aten::_foreach_add_.Scalar([%0, %1], $0=1)",
        ["aten::_foreach_add.Scalar([%0, %1], $0=1)"],
    ),
    (
        "(%6: f32[8], %7: f64[8]) = aten::_foreach_copy_([%1, %2], [%2, %1], False)",
        ["aten::_to_copy(%2, dtype=f32, non_blocking=False)", "aten::_to_copy(%1, dtype=f64, non_blocking=False)"],
    ),
    (
        (
            "(%6: f32[4, 8], %7: f32[8], %8: f32[8], %9: f32[8], %10: f32[8]) = aten::_native_batch_norm_legit"
            "(%0, None, None, %1, %1, True, 0.1, 1e-05)"
        ),
        ["aten::_native_batch_norm_legit_functional(%0, None, None, %1, %1, True, 0.1, 1e-05)"],
    ),
    (
        "%6: f32[4, 8] = aten::uniform_(%0, 0.0, 1.0, generator=$0=seed(1))",
        ["aten::uniform(%0, 0.0, 1.0, generator=$0=seed(1))"],
    ),
    (
        "%6: f32[8] = aten::normal_(%1, 0.0, 1.0, generator=$0=seed(1))",
        ["aten::normal_functional(%1, 0.0, 1.0, generator=$0=seed(1))"],
    ),
    ("%6: i32[8] = aten::__ilshift__.Scalar(%5, 1)", ["aten::__lshift__.Scalar(%5, 1)"]),
    # No pure form: kept and marked.
    ("%6: f32[8] = aten::_sobol_engine_ff_(%1, 1, %5, 1, 1)", ["aten::_sobol_engine_ff_(%1, 1, %5, 1, 1) [kept]"]),
    # Draws in the order of the strides it fills, which the pure operator does not have.
    (
        "%6: f32[4, 8]{1, 4} = aten::bernoulli_.float(%4, 0.5, generator=$0=seed(1))",
        ["aten::bernoulli_.float(%4, 0.5, generator=$0=seed(1)) [kept]"],
    ),
    # Accumulates in f64, which the pure operator cannot be told.
    (
        "%6: f64[8] = aten::logsumexp.out(%0, [0], False, out=%2)",
        ["aten::logsumexp.out(%0, [0], False, out=%2) [kept]"],
    ),
]


@pytest.mark.parametrize(("line", "expected"), CASES, ids=[case[0].partition(" = ")[2] for case in CASES])
def test_operators(line: str, expected: list[str]) -> None:
    assert functional(line) == expected


def test_strides_do_not_matter_where_the_result_is_only_scattered() -> None:
    graph = parse("""
graph(%0: f32[4, 8], %1: f32[4]):
  %2: f32[4]{8} = tarry::strided_view(%0, f32, [4], [8], 2)
  %3: f32[4]{8} = aten::add_.Tensor(%2, %1, alpha=1)
  %4: f32[4, 8] = tarry::strided_scatter(%0, %3, f32, [4], [8], 2)
  return %4 -> %0
""")
    assert (
        to_text(functionalize(graph))
        == """\
graph(%0: f32[4, 8], %1: f32[4]):
  %2: f32[4]{8} = tarry::strided_view(%0, f32, [4], [8], 2)
  %3: f32[4] = aten::add.Tensor(%2, %1, alpha=1)
  %4: f32[4, 8] = tarry::strided_scatter(%0, %3, f32, [4], [8], 2)
  return %4 -> %0"""
    )


def test_strides_with_gaps_come_from_the_buffer_that_has_them() -> None:
    base = torch.arange(12.0).as_strided((3, 2), (4, 1))
    graph = parse("""
graph(%0: f32[3, 2]{4, 1}):
  %1: f32[3, 2]{4, 1} = aten::neg_(%0)
  %2: f32[9] = tarry::strided_view(%1, f32, [9], [1], 0)
  return %1 -> %0, %2
""")
    from tarry.ir import evaluate

    wanted = [0, -1, 2, 3, -4, -5, 6, 7, -8]
    assert evaluate(graph, [base])[1].tolist() == wanted
    assert evaluate(functionalize(graph), [base])[1].tolist() == wanted


def test_a_pure_graph_stays_as_it_is() -> None:
    graph = parse("graph(%0: f32[4]):\n  %1: f32[4] = aten::neg(%0)\n  return %1")
    assert functionalize(graph) is graph
    assert kept_operators(graph) == []


def test_sites_and_regions_are_inherited() -> None:
    graph = functionalize(
        parse(f"{HEADER}\n  %6: f32[8] = aten::add_.Tensor(%1, %2, alpha=1) [region=2]  # a.py:3\n  return %6")
    )
    assert [(str(node.site), node.region) for node in graph.nodes] == [("a.py:3", 2)] * 2


# --- against what the operators really do, on dense tensors, on transposed ones and through slices --------------------

X = Callable[[torch.Tensor], Any]
INPLACE: dict[str, X] = {
    "add": lambda x: x.add_(2),
    "add tensor": lambda x: x.add_(torch.ones(x.shape), alpha=0.5),
    "add f64": lambda x: x.add_(torch.ones(x.shape, dtype=torch.float64) / 3),
    "sub": lambda x: x.sub_(1.5),
    "mul": lambda x: x.mul_(x.sum()),
    "div": lambda x: x.div_(3),
    "div rounding": lambda x: x.div_(3, rounding_mode="floor"),
    "floor_divide": lambda x: x.floor_divide_(2),
    "remainder": lambda x: x.remainder_(2),
    "pow": lambda x: x.pow_(2),
    "neg": lambda x: x.neg_(),
    "abs": lambda x: x.abs_(),
    "sign": lambda x: x.sign_(),
    "round": lambda x: x.round_(),
    "clamp": lambda x: x.clamp_(-0.5, 0.5),
    "clamp tensor": lambda x: x.clamp_(min=torch.zeros(())),
    "relu": lambda x: x.relu_(),
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu_(x),
    "hardtanh": lambda x: torch.nn.functional.hardtanh_(x),
    "threshold": lambda x: torch.nn.functional.threshold_(x, 0.1, 2),
    "zero": lambda x: x.zero_(),
    "fill": lambda x: x.fill_(3),
    "fill tensor": lambda x: x.fill_(torch.tensor(3)),
    "copy": lambda x: x.copy_(torch.arange(x.numel()).view(x.shape)),
    "copy broadcast": lambda x: x.copy_(torch.ones(())),
    "masked_fill": lambda x: x.masked_fill_(x > 0, 7),
    "masked_scatter": lambda x: x.masked_scatter_(x > 0, torch.arange(float(x.numel()))),
    "index_fill": lambda x: x.index_fill_(0, torch.tensor([1]), 7),
    "index_add": lambda x: x.index_add_(0, torch.tensor([1]), torch.ones(1, x.shape[1])),
    "index_copy": lambda x: x.index_copy_(0, torch.tensor([1]), torch.ones(1, x.shape[1])),
    "index_put": lambda x: x.index_put_((torch.tensor([1]),), torch.ones(())),
    "index_put accumulate": lambda x: x.index_put_((torch.tensor([1, 1]),), torch.ones(()), accumulate=True),
    "scatter": lambda x: x.scatter_(0, torch.zeros(1, x.shape[1], dtype=torch.int64), 5.0),
    "scatter_add": lambda x: x.scatter_add_(0, torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2)),
    "scatter_reduce": lambda x: x.scatter_reduce_(0, torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2), "amax"),
    "put": lambda x: x.put_(torch.tensor([1, 3]), torch.ones(2)),
    "tril": lambda x: x.tril_(),
    "triu": lambda x: x.triu_(1),
    "cumsum": lambda x: x.cumsum_(0),
    "lerp": lambda x: x.lerp_(torch.ones(x.shape), 0.5),
    "addcmul": lambda x: x.addcmul_(torch.ones(x.shape), torch.ones(x.shape), value=0.5),
    "addcdiv": lambda x: x.addcdiv_(torch.ones(x.shape), torch.full(x.shape, 4.0), value=0.5),
    "gt": lambda x: x.gt_(0),
    "logical_not": lambda x: x.logical_not_(),
    "bernoulli": lambda x: x.bernoulli_(0.5),
    "uniform": lambda x: x.uniform_(-1, 1),
    "normal": lambda x: x.normal_(1, 2),
    "exponential": lambda x: x.exponential_(),
    "random": lambda x: x.random_(0, 10),
    "out": lambda x: torch.add(torch.ones(x.shape), 2, out=x),
    "out of a sum": lambda x: torch.cumsum(torch.ones(x.shape, dtype=torch.float16), 0, out=x),
    "setitem": lambda x: x.__setitem__((slice(None), 1), 4.0),
    "setitem mask": lambda x: x.__setitem__(x > 0, 4.0),
    "foreach": lambda x: torch._foreach_add_([x[0], x[1]], [x[1] * 1, x[0] * 1]),
    "foreach div": lambda x: torch._foreach_div_([x], 3.0),
    "foreach zero": lambda x: torch._foreach_zero_([x[0], x[2]]),
    "foreach copy": lambda x: torch._foreach_copy_([x[0], x[2]], [torch.ones(()), x[1] * 1]),
    "foreach norm": lambda x: torch._foreach_mul_([x], torch._foreach_norm([x])[0]),
    "chain": lambda x: x.add_(1).mul_(2).t().sub_(1)[1:].neg_(),
    "through itself": lambda x: x[0].add_(x[1]),
}
PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x[0].clone(),
    "transposed": lambda x: x[0].t().contiguous().t(),
    "slice": lambda x: x[1],
    "gaps": lambda x: x[:, :, 1],
    "transposed view": lambda x: x[1].t(),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", INPLACE)
def test_in_place_operators(name: str, place: str) -> None:
    x = PLACES[place](torch.randn(5, 5, 5))
    check_stages(record(lambda: INPLACE[name](x)))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64]
)
def test_results_are_cast_to_what_they_overwrite(dtype: torch.dtype) -> None:
    x, y = torch.ones(3, 4).to(dtype), torch.full((4,), 3).to(dtype)

    def program() -> None:
        x.eq_(y)
        x[:, 1:].copy_(torch.arange(3.0))
        x.logical_or_(y)
        if not dtype.is_complex:
            x[0].copy_(torch.tensor(1.5, dtype=torch.float64))
        if dtype not in (torch.bool, torch.complex64):
            x.add_(y.long() if not dtype.is_floating_point else y.double())

    check_stages(record(program))
