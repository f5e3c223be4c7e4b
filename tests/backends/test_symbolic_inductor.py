"""Inductor's programs with symbolic sizes, at every size that they are used for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tarry
from tarry.backends.base import Computation
from tarry.backends.inductor import InductorBackend, why_not
from tarry.backends.inductor.guards import Guards
from tarry.backends.inductor.symbolic import SymbolicSizes
from tarry.errors import Unsupported
from tarry.events import record
from tarry.ir.graph import Graph
from tarry.ir.sizes import Symbols
from tests.backends.simple import using
from tests.support.sized import PROGRAMS, SizedProgram, generate, losses

USES_DEVICE = True
needs_inductor = pytest.mark.skipif(bool(why_not("cpu")), reason="Inductor does not work here")


class OnlySymbolic(InductorBackend):
    """Compiles steps whose sizes vary, and no others: those are tested enough, and take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.symbolic: list[Graph] = []
        self.native = False

    def compile(self, graph: Graph) -> Computation:
        raise Unsupported(None, "not in this test")

    def compile_symbolic(self, graph: Graph, symbols: Symbols) -> Computation:
        made = super().compile_symbolic(graph, symbols)
        self.symbolic.append(graph)
        self.native = made.native is not None
        return made


@pytest.fixture
def backend() -> Iterator[OnlySymbolic]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that static steps run on the reference path
        with using(OnlySymbolic()) as chosen:
            yield chosen


def interpreted(seen: list[Any]) -> int:
    return sum(event.kind == "interpreted" for event in seen)


@pytest.mark.slow
@needs_inductor
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.name != "gpt, batch"], ids=lambda program: program.name)
def test_training_at_many_sizes(backend: OnlySymbolic, program: SizedProgram) -> None:
    sizes = (*program.sizes, *range(2, 20, 3), 33, 64 if "convolution" in program.name else 48)
    expected = losses(program, sizes, "cpu")
    with record() as seen:
        found = losses(program, sizes, "tarry")
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)
    assert len(backend.symbolic) == 1
    assert interpreted(seen) <= 2  # the first step, which makes the optimizer's state, and the second
    assert backend.native


@pytest.mark.slow
@needs_inductor
def test_generation_with_a_growing_cache(backend: OnlySymbolic) -> None:
    expected = generate("cpu", 32)
    assert generate("tarry", 32) == expected
    with record() as seen:
        assert generate("tarry", 32) == expected
    assert not any(event.kind == "compile" for event in seen)
    assert interpreted(seen) <= 3  # the prompt, and what was there before there was a template
    assert len(backend.symbolic) == 1
    assert backend.native


@pytest.mark.slow
@needs_inductor
def test_dropout_draws_what_the_reference_path_draws(backend: OnlySymbolic) -> None:
    def drawn() -> list[Tensor]:
        torch.manual_seed(0)
        made = []
        for size in (4, 5, 6, 9):
            x = torch.ones(size, 7, device="tarry")
            tarry.mark_step()
            made.append((F.dropout(x, 0.5) * 3).cpu())
        return made

    found = drawn()
    assert backend.symbolic
    tarry.set_backend("eager")
    assert all(map(torch.equal, found, drawn()))


@needs_inductor
def test_what_was_assumed_of_a_size_is_compared() -> None:
    sizes = SymbolicSizes((13, 17))
    first, second = sizes.symbols
    assert bool(first < second)
    assert bool(first > 1)  # true of any symbol
    accepts = sizes.guards()
    assert accepts((3, 4))
    assert not accepts((4, 3))


def test_guards_are_text_that_is_checked() -> None:
    guards = Guards(["s0 < s1", "(s0 + 1) // 2 <= 4096", "max(s0, s1) % 2 == 0"], 2)
    again = Guards(guards.conditions, guards.symbols)
    for values in ((3, 4), (4, 3), (9000, 9002), (3, 5)):
        expected = values[0] < values[1] and (values[0] + 1) // 2 <= 4096 and max(values) % 2 == 0
        assert guards(values) == again(values) == expected
    assert Guards([], 1)((7,))


@pytest.mark.slow
@needs_inductor
def test_a_program_as_bytes_keeps_its_guards(backend: OnlySymbolic) -> None:
    for size in (8, 9):
        x = torch.ones(size, 300).to("tarry")
        tarry.mark_step()
        (x.softmax(0) @ x.T).sum().item()
    (graph,) = [graph for graph in backend.symbolic if any("softmax" in node.op for node in graph.nodes)]
    made = InductorBackend().compile_symbolic(graph, (11,))
    assert made.artifact is not None
    again = InductorBackend().load(graph, made.artifact())
    assert again.native is not None
    assert isinstance(made.accepts, Guards)
    assert isinstance(again.accepts, Guards)
    assert again.accepts.conditions == made.accepts.conditions
    for size in (2, 11, 40):
        (value,) = graph.inputs
        x = torch.rand(size, 300)
        numbers = [number.value for number in graph.numbers] + [size]
        assert again.accepts((size,))
        assert value.type.sizes[1] == 300
        torch.testing.assert_close(list(again.run([x], numbers)), list(made.run([x], numbers)))


@needs_inductor
def test_a_size_that_was_fixed_is_no_symbol() -> None:
    sizes = SymbolicSizes((13,))
    assert bool(sizes.symbols[0] == 13)
    with pytest.raises(Unsupported, match="one value only"):
        sizes.guards()
