"""Which outputs may overwrite the input they replace: those that come after everything that can fail."""

from __future__ import annotations

import pytest
import torch

import tarry
from tarry.ir.graph import Graph
from tarry.ir.text import parse
from tarry.passes.donation import safe_updates

USES_DEVICE = True


def _kept(text: str) -> list[int | None]:
    return list(safe_updates(parse(text)).replaces)


def test_without_anything_that_fails_all_are_safe() -> None:
    text = """
        graph(%0: f32[2], %1: f32[2]):
          %2: f32[2] = aten::add.Tensor(%0, %1, alpha=1)
          %3: f32[2] = aten::sin(%1)
          return %2 -> %0, %3 -> %1, %2
    """
    assert _kept(text.replace(", %2\n", "\n")) == [0, 1]


def test_only_what_depends_on_every_failure_is_safe() -> None:
    text = """
        graph(%0: f32[3, 2], %1: i64[2], %2: f32[2], %3: f32[3, 2], %4: f32[2]):
          %5: f32[2, 2] = aten::embedding(%0, %1, -1, False, False)
          %6: f32[2, 2] = aten::embedding(%3, %1, -1, False, False)
          %7: f32[2] = aten::sum.dim_IntList(%5, [0], False, dtype=None)
          %8: f32[2] = aten::add.Tensor(%2, %7, alpha=1)
          %9: f32[2] = aten::sum.dim_IntList(%6, [0], False, dtype=None)
          %10: f32[2] = aten::add.Tensor(%8, %9, alpha=1)
          %11: f32[3, 2] = aten::add.Tensor(%0, %10, alpha=1)
          return %8 -> %2, %11 -> %0, %10 -> %4
    """
    # %8 comes after the first lookup only; the others after both.
    assert _kept(text) == [None, 0, 4]


def test_an_output_that_replaces_nothing_stays_so() -> None:
    text = """
        graph(%0: f32[3, 2], %1: i64[2]):
          %2: f32[2, 2] = aten::embedding(%0, %1, -1, False, False)
          %3: f32[3, 2] = aten::sin(%0)
          return %2, %3 -> %0
    """
    assert _kept(text) == [None, None]


def test_a_cuda_device_checks_an_index_in_the_kernel() -> None:
    text = """
        graph(%0: f32[3, 2], %1: i64[2]):
          %2: f32[2, 2] = aten::embedding(%0, %1, -1, False, False)
          %3: f32[3, 2] = aten::sin(%0)
          return %2, %3 -> %0
    """
    assert safe_updates(parse(text), "cuda").replaces == (None, 0)
    inverse = text.replace("aten::embedding(%0, %1, -1, False, False)", "aten::linalg_inv_ex(%2)")
    inverse = inverse.replace("%2: f32[2, 2] =", "(%2: f32[2, 2], %4: i32[]) =").replace("(%2)", "(%5, False)")
    inverse = inverse.replace("%1: i64[2]", "%5: f32[2, 2]")
    assert safe_updates(parse(inverse), "cuda").replaces == (None, None), "a kernel on the host's side raises"


MAY_FAIL = {
    "index": "%2: f32[4] = aten::index.Tensor(%0, [%1])",
    "gather": "%2: f32[4] = aten::gather(%0, 0, %1, False)",
    "scatter": "%2: f32[4] = aten::scatter.value(%0, 0, %1, 1.0)",
    "index_put": "%2: f32[4] = aten::index_put(%0, [%1], %0, False)",
    "bernoulli": "%2: f32[4] = aten::bernoulli(%0, generator=$0=seed(1))",
    "integer division": '%2: i64[4] = aten::div.Tensor_mode(%1, %1, rounding_mode="trunc")',
    "integer remainder": "%2: i64[4] = aten::remainder.Tensor(%1, %1)",
    "integer floor division": "%2: i64[4] = aten::floor_divide(%1, %1)",
    "integer fmod": "%2: i64[4] = aten::fmod.Tensor(%1, %1)",
    "integer power": "%2: i64[4] = aten::pow.Tensor_Scalar(%1, $0=2)",
    "binary cross entropy": "%2: f32[] = aten::binary_cross_entropy(%0, %0, None, 1)",
    "repeat": "%2: f32[4] = aten::take(%0, %1)",
    "exponential": "%2: f32[4] = aten::exponential(%0, $0=1.0, generator=$1=seed(1))",
    "celu": "%2: f32[4] = aten::celu(%0, $0=1.0)",
    "renorm": "%2: f32[4] = aten::renorm(%0, $0=2, 0, $1=1)",
}
CANNOT_FAIL = {
    "division": "%2: f32[4] = aten::div.Tensor(%0, %0)",
    "floating remainder": "%2: f32[4] = aten::remainder.Tensor(%0, %0)",
    "floating power": "%2: f32[4] = aten::pow.Tensor_Scalar(%0, $0=2)",
    "true division of integers": "%2: f32[4] = aten::div.Tensor(%1, %1)",
    "window": "%2: f32[4] = aten::slice_scatter(%0, %0, 0, 0, 4, 1)",
    "matrix": "%2: f32[] = aten::dot(%0, %0)",
    "gradient of a lookup": "%2: f32[5, 4] = aten::embedding_dense_backward(%3, %1, 5, -1, False)",
    "sigmoid": "%2: f32[4] = aten::sigmoid(%0)",
}


def _beside(line: str) -> Graph:
    return parse(f"""
        graph(%0: f32[4], %1: i64[4], %3: f32[4, 4]):
          {line}
          %4: f32[4] = aten::sin(%0)
          return %2, %4 -> %0
    """)


@pytest.mark.parametrize("line", MAY_FAIL.values(), ids=MAY_FAIL)
def test_what_may_fail(line: str) -> None:
    assert safe_updates(_beside(line)).replaces == (None, None)


@pytest.mark.parametrize("line", CANNOT_FAIL.values(), ids=CANNOT_FAIL)
def test_what_cannot_fail(line: str) -> None:
    assert safe_updates(_beside(line)).replaces == (None, 0)


FAILURES = {
    "integer division by zero": lambda d: torch.tensor([4]).to(d) // torch.tensor([0]).to(d),
    "integer remainder of zero": lambda d: torch.tensor([4]).to(d) % torch.tensor([0]).to(d),
    "integer fmod of zero": lambda d: torch.tensor([4]).to(d).fmod(torch.tensor([0]).to(d)),
    "index": lambda d: torch.ones(3).to(d)[torch.tensor([5]).to(d)],
    "gather": lambda d: torch.ones(3).to(d).gather(0, torch.tensor([5]).to(d)),
    "scatter": lambda d: torch.ones(3).to(d).scatter(0, torch.tensor([5]).to(d), 1.0),
    "index_add": lambda d: torch.ones(3).to(d).index_add(0, torch.tensor([5]).to(d), torch.ones(1).to(d)),
    "take": lambda d: torch.ones(3).to(d).take(torch.tensor([5]).to(d)),
    "embedding": lambda d: torch.nn.functional.embedding(torch.tensor([5]).to(d), torch.ones(3, 2).to(d)),
    "nll": lambda d: torch.nn.functional.nll_loss(torch.ones(1, 3).to(d), torch.tensor([5]).to(d)),
    "cholesky": lambda d: torch.linalg.cholesky(-torch.eye(2).to(d)),
    "inverse": lambda d: torch.linalg.inv(torch.zeros(2, 2).to(d)),
    "bernoulli": lambda d: torch.bernoulli(torch.full((3,), 2.0).to(d)),
    "binary cross entropy": lambda d: torch.nn.functional.binary_cross_entropy(
        torch.full((3,), 2.0).to(d), torch.ones(3).to(d)
    ),
    "multi margin": lambda d: torch.nn.functional.multi_margin_loss(torch.ones(1, 3).to(d), torch.tensor([5]).to(d)),
    "multilabel margin": lambda d: torch.nn.functional.multilabel_margin_loss(
        torch.ones(1, 3).to(d), torch.tensor([[5, -1, -1]]).to(d)
    ),
    "max_unpool": lambda d: torch.nn.functional.max_unpool1d(
        torch.ones(1, 1, 2).to(d), torch.tensor([[[0, 99]]]).to(d), 2
    ),
    "masked_scatter": lambda d: torch.zeros(3).to(d).masked_scatter(torch.ones(3).to(d) > 0, torch.ones(2).to(d)),
    "multinomial": lambda d: torch.multinomial(torch.tensor([-1.0, 2.0]).to(d), 1),
    "poisson": lambda d: torch.poisson(torch.tensor([-1.0]).to(d)),
    "embedding_bag": lambda d: torch.nn.functional.embedding_bag(
        torch.tensor([[5]]).to(d), torch.ones(3, 2).to(d), mode="sum"
    ),
    "segment_reduce": lambda d: torch.segment_reduce(torch.ones(3).to(d), "sum", lengths=torch.tensor([5]).to(d)),
    "ctc": lambda d: torch.nn.functional.ctc_loss(
        torch.zeros(2, 1, 3).to(d), torch.tensor([[1]]).to(d), torch.tensor([9]).to(d), torch.tensor([1]).to(d)
    ),
}


@pytest.mark.parametrize("program", FAILURES.values(), ids=FAILURES)
def test_what_fails_in_eager_is_known_to_fail(program: object) -> None:
    """The list of words is checked against real failures: whatever is recorded and then fails must block updates."""
    assert callable(program)
    with pytest.raises(Exception):  # noqa: B017 - whatever PyTorch raises
        program("cpu")
    counter = torch.zeros(2).to("tarry")
    try:
        made = program("tarry")
    except Exception:
        return  # fails while it is recorded, before there is a step
    counter.add_(1)
    graph = tarry.graph(counter, *(made if isinstance(made, tuple) else [made]), stage="optimized")
    del made  # it is never computed
    assert any(index is not None for index in graph.replaces)
    assert all(index is None for index in safe_updates(graph).replaces), str(graph)


def test_an_index_and_its_backward_fail_together() -> None:
    """`late` depends on the lookup and not on its backward pass; it may be updated all the same."""
    for lookup in (
        lambda table, ids: table[ids],
        lambda table, ids: table.gather(0, ids[:, None].expand(-1, 2)),
        lambda table, ids: table.index_select(0, ids),
        lambda table, ids: torch.nn.functional.embedding(ids, table),
    ):
        early = torch.rand(3, 2).to("tarry").requires_grad_()
        late = torch.rand(2).to("tarry").requires_grad_()
        ids = torch.tensor([0, 2]).to("tarry")
        tarry.mark_step()
        loss = (lookup(early, ids) * late).square().sum()
        gradients = torch.autograd.grad(loss, [early, late])
        with torch.no_grad():
            for parameter, gradient in zip((early, late), gradients, strict=True):
                parameter.sub_(gradient)
        graph = tarry.graph(early, late, stage="optimized")
        assert safe_updates(graph).replaces == graph.replaces != (None, None), str(graph)


def test_other_sizes_are_another_check() -> None:
    text = """
        graph(%0: f32[4], %1: i64[4], %2: f32[9], %3: f32[4]):
          %4: f32[4] = aten::index.Tensor(%0, [%1])
          %5: f32[SIZE] = aten::index_put(%2, [%1], %4, True)
          %6: f32[4] = aten::add.Tensor(%3, %4, alpha=1)
          return %5, %6 -> %3
    """
    assert _kept(text.replace("SIZE", "9")) == [None, None]
    assert _kept(text.replace("SIZE", "4").replace("f32[9]", "f32[4]")) == [None, 3]
