"""Steps whose sizes vary: one program for all of them, right at every size.

The backend here walks over the graph at the values of the symbols, so that nothing is compiled: what is tested is the
graph that a compiler would be given. Inductor has the same programs in test_symbolic_inductor.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import tarry
from tarry.backends.base import Capabilities, Computation
from tarry.errors import Unsupported
from tarry.events import record
from tarry.ir.graph import Graph, Node, Number
from tarry.ir.sizes import Symbols, at
from tarry.ir.text import parse, to_text
from tarry.ir.verify import verify
from tarry.runtime.compile import reasons
from tests.backends.simple import Walking, using
from tests.support.sized import PROGRAMS, SizedProgram, generate, losses

USES_DEVICE = True


class SymbolicWalking(Walking):
    """Takes steps whose sizes vary, and checks that what it was given is a graph at every size that it meets."""

    name = "symbolic walking"
    capabilities = Capabilities(updates_in_place=True, symbolic_sizes=True)

    def __init__(self, accepts: Callable[[Sequence[int]], bool] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.accepts = accepts
        self.symbolic: list[Graph] = []

    def compile_symbolic(self, graph: Graph, symbols: Symbols) -> Computation:
        self.symbolic.append(graph)
        concrete = at(graph, symbols)
        assert concrete.inputs == graph.inputs
        calls = [[(node.op, node.args, node.outputs) for node in each.nodes] for each in (concrete, graph)]
        assert calls[0] == calls[1]
        text = to_text(graph)
        graph = parse(text)  # what another process is given
        assert to_text(graph) == text

        def run(inputs: list[torch.Tensor], numbers: list[Any]) -> list[Any]:
            count = len(graph.numbers)
            concrete = at(graph, numbers[count:])
            verify(concrete, "optimized")
            assert [tuple(x.shape) for x in inputs] == [value.type.sizes for value in concrete.inputs]
            return self.walk(concrete, inputs, numbers[:count])

        return Computation(run, graph, accepts=self.accepts)


def compiles(seen: list[Any]) -> int:
    return sum(event.kind == "compile" for event in seen)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_dimension_that_varies_costs_two_programs(program: SizedProgram) -> None:
    sizes = program.sizes
    expected = losses(program, sizes, "cpu")
    with using(SymbolicWalking()) as backend:
        losses(program, sizes[:2], "tarry")  # state of the optimizer, which is not there in the very first step
        backend.graphs.clear()
        backend.symbolic.clear()
        with record() as seen:
            found = losses(program, sizes, "tarry")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert compiles(seen) <= program.compiles
    assert not any(event.kind == "interpreted" for event in seen)


@settings(max_examples=12)
@given(sizes=st.lists(st.integers(1, 12), min_size=3, max_size=6))
@pytest.mark.parametrize("program", PROGRAMS[:2], ids=lambda program: program.name)
def test_any_sizes_give_what_eager_gives(program: SizedProgram, sizes: list[int]) -> None:
    expected = losses(program, sizes, "cpu")
    with using(SymbolicWalking()):
        torch.testing.assert_close(losses(program, sizes, "tarry"), expected, rtol=1e-3, atol=1e-5)


def test_generation_with_a_growing_cache() -> None:
    expected = generate("cpu", 24)
    with using(SymbolicWalking()), record() as seen:
        assert generate("tarry", 24) == expected
        first = compiles(seen)
        assert generate("tarry", 24) == expected
        assert compiles(seen) == first
    assert first <= 5  # the prompt, the first token of the cache, the second size of it


def test_sizes_zero_and_one_are_compiled_by_themselves() -> None:
    with using(SymbolicWalking()) as backend:
        for size in (4, 5, 1, 0, 6):
            x = torch.ones(size, 3, device="tarry")
            tarry.mark_step()
            assert (x.sum(1) * 2).tolist() == [6.0] * size
        assert len(backend.symbolic) >= 1


def step(size: int, *, second: int = 3) -> list[float]:
    x = torch.ones(size, second, device="tarry")
    tarry.mark_step()
    result: list[float] = (x.sum(1) * 2).tolist()
    return result


def test_it_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    reasons.reasons.forget()
    with using(SymbolicWalking()), caplog.at_level(logging.WARNING, logger="tarry"):
        for size in (4, 5, 6, 7):
            step(size)
    lines = [entry.getMessage() for entry in caplog.records if "float32[5, 3]" in entry.getMessage()]
    assert len(lines) == 1
    assert "dimension 0 of an input float32[5, 3] (used at " in lines[0]
    assert "test_symbolic.py:" in lines[0]
    assert "was 4 and is 5 now" in lines[0]


def test_a_second_dimension_that_varies_makes_another_program() -> None:
    with using(SymbolicWalking()) as backend:
        for size, second in ((4, 3), (5, 3), (6, 3), (6, 7), (8, 9), (9, 8)):
            assert step(size, second=second) == [2.0 * second] * size
        sums = [graph for graph in backend.symbolic if any(node.op.startswith("aten::sum") for node in graph.nodes)]
    assert len(sums) == 2


def test_a_program_is_not_used_where_the_backend_says_no() -> None:
    with using(SymbolicWalking(accepts=lambda symbols: symbols[0] != 7)) as backend, record() as seen:
        for size in (4, 5, 7, 7, 6):
            assert step(size) == [6.0] * size
        assert any(value.type.sizes == (7, 3) for graph in backend.graphs for value in graph.inputs)
    assert not any(event.kind in ("error", "interpreted") for event in seen)


class Ranged(SymbolicWalking):
    """Its programs are right up to twice the size that they were made with."""

    def compile_symbolic(self, graph: Graph, symbols: Symbols) -> Computation:
        made = super().compile_symbolic(graph, symbols)
        return replace(made, accepts=lambda values: values[0] <= 2 * symbols[0])


def test_another_range_of_sizes_has_a_program_of_its_own() -> None:
    with using(Ranged()) as backend, record() as seen:
        for size in (4, 5, 6, 100, 101, 7, 102):
            assert step(size) == [6.0] * size
        sums = [graph for graph in backend.symbolic if any(node.op.startswith("aten::sum") for node in graph.nodes)]
        assert len(sums) == 2
        assert not any(value.type.sizes == (100, 3) for graph in backend.graphs for value in graph.inputs)
    assert not any(event.kind in ("error", "interpreted") for event in seen)


class Refusing(SymbolicWalking):
    def compile_symbolic(self, graph: Graph, symbols: Symbols) -> Computation:
        raise Unsupported(None, "not today")


@pytest.mark.parametrize("backend", [Refusing, Walking])
def test_after_some_sizes_nothing_more_is_compiled(backend: type[Walking], caplog: pytest.LogCaptureFixture) -> None:
    with using(backend()), record() as seen, caplog.at_level(logging.WARNING, logger="tarry"):
        for size in (*range(2, 18), 3, 16):
            assert step(size) == [6.0] * size
    lines = [e.getMessage() for e in caplog.records if "different sizes" in e.getMessage()]
    assert len(lines) == len(set(lines)) <= 2  # the step that fills, and the one that sums
    assert any("test_symbolic.py" in line for line in lines)
    assert sum(event.kind == "reference" for event in seen) >= 8
    assert compiles(seen) <= 2 * 10


def test_it_can_be_turned_off() -> None:
    with using(SymbolicWalking()) as backend, tarry.config.override(symbolic_sizes=False):
        for size in (4, 5, 6):
            step(size)
    assert backend.symbolic == []


def test_numbers_that_are_constants_are_compared_at_every_size() -> None:
    def refuses(node: Node, number: Number, varied: bool) -> bool:
        return True

    with using(SymbolicWalking(refuses=refuses)):
        for factor in (2.0, 3.0):
            for size in (4, 5, 6):
                x = torch.ones(size, device="tarry")
                tarry.mark_step()
                assert (x * factor).tolist() == [factor] * size


def test_numbers_that_depend_on_sizes() -> None:
    """`arange` has its end as a number, and a mean divides by a number of elements."""
    with using(SymbolicWalking()):
        for size in (4, 5, 6, 9):
            x = torch.ones(size, 2, device="tarry", requires_grad=True)
            tarry.mark_step()
            (x.mean() + (torch.arange(size, device="tarry") * x[:, 0]).sum()).backward()
            assert x.grad is not None
            expected = torch.full((size, 2), 1 / (2 * size))
            expected[:, 0] += torch.arange(size)
            torch.testing.assert_close(x.grad.cpu(), expected)


def test_random_numbers_are_those_of_the_reference_path() -> None:
    def drawn() -> list[Tensor]:
        torch.manual_seed(0)
        made = []
        for size in (4, 5, 6, 9):
            x = torch.ones(size, 7, device="tarry")
            tarry.mark_step()
            made.append(F.dropout(x, 0.5).cpu())
        return made

    with using("eager"):
        expected = drawn()
    with using(SymbolicWalking()) as backend:
        found = drawn()
        assert backend.symbolic
    assert all(map(torch.equal, found, expected))


def test_parameters_are_updated_in_place_at_every_size() -> None:
    model = nn.Linear(3, 2)
    with using(SymbolicWalking()):
        on_device = nn.Linear(3, 2).to("tarry")
        on_device.load_state_dict(model.state_dict())
        for size in (4, 5, 6, 7):
            for each, device in ((model, "cpu"), (on_device, "tarry")):
                each(torch.ones(size, 3, device=device)).sum().backward()
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
            tarry.mark_step()
        torch.testing.assert_close(on_device.weight.cpu(), model.weight)
