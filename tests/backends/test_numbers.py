"""Numbers are inputs where the backend can take them; where it cannot, a changed number is another program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tarry
from tarry.errors import FallbackError, Unsupported
from tarry.events import Event, expect, record
from tarry.ir.graph import Graph, Node, Number, leaves
from tarry.runtime.limits import MAX_VARIANTS
from tests.backends.simple import Walking, using

USES_DEVICE = True


def _refuse_all(node: Node, number: Number, varied: bool) -> bool:
    return True


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


NUMBERS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "wrapped": lambda x, number: x * number,
    "alpha": lambda x, number: x.add(x, alpha=number),
    "scalar argument": lambda x, number: torch.clamp(x, max=number),
    "two of them": lambda x, number: x.clamp(number, number + 1),
    "in place": lambda x, number: x.clone().mul_(number),
    "fill": lambda x, number: torch.full_like(x, number),
    "value": lambda x, number: torch.addcmul(x, x, x, value=number),
    "threshold": lambda x, number: torch.nn.functional.threshold(x, number, -number),
    "foreach": lambda x, number: torch._foreach_mul([x, x + 1], [number, 2.0])[0],
}


@pytest.mark.parametrize("program", NUMBERS.values(), ids=NUMBERS)
def test_a_backend_that_takes_numbers_compiles_once(program: Callable[..., torch.Tensor]) -> None:
    x = torch.arange(5.0) - 2
    lazy = x.to("tarry")
    with using(Walking()), expect(compiles=1, fallbacks=0):
        for number in (0.5, 0.25, -3.0, 0.0, -0.0, 7.5, math.inf):
            assert _same_bits(program(lazy, number).cpu(), program(x, number)), number


@pytest.mark.parametrize("program", NUMBERS.values(), ids=NUMBERS)
def test_a_backend_that_takes_none_compiles_for_each_value(program: Callable[..., torch.Tensor]) -> None:
    x = torch.arange(5.0) - 2
    lazy = x.to("tarry")
    backend = Walking(refuses=_refuse_all)
    with using(backend):
        for number in (0.5, 0.25, 0.5, 0.25, -3.0, 0.5):
            assert _same_bits(program(lazy, number).cpu(), program(x, number)), number
        assert len(backend.graphs) == 3
    for graph in backend.graphs:
        assert not any(isinstance(leaf, Number) for node in graph.nodes for leaf in leaves(node.args))


def _train(device: str, steps: int) -> tuple[list[float], torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    losses = []
    for k in range(steps):
        x = torch.linspace(-1, 1, 12).view(3, 4).add(k / 10).to(device)
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, net[0].weight.detach().cpu()


def test_a_schedule_needs_no_new_program() -> None:
    expected, weight = _train("cpu", 12)
    with using(Walking()), record() as seen:
        losses, moved = _train("tarry", 12)
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(moved, weight)
    # Moving the parameters may be a step of its own; the first step makes the optimizer's state, the others read it.
    lookups = [event.kind for event in seen if event.kind in ("compile", "cache_hit")]
    assert lookups.count("compile") <= 3
    assert "compile" not in lookups[5:]


def test_a_schedule_with_a_backend_that_takes_varied_numbers_only() -> None:
    """What most compilers want: constants where numbers are constant, inputs where they are seen to change."""
    asked: list[tuple[str, bool]] = []

    def refuses(node: Node, number: Number, varied: bool) -> bool:
        asked.append((node.op, varied))
        return not varied

    expected, _ = _train("cpu", 12)
    with using(Walking(refuses=refuses)) as backend, record() as seen:
        losses, _ = _train("tarry", 12)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert {varied for _, varied in asked} == {False, True}
    compiles = [event for event in seen if event.kind == "compile"]
    again = [event for event in compiles if event.fields["again"]]
    assert 1 <= len(again) <= 3, [event.fields["reason"] for event in again]
    assert not [event for event in seen if event.kind == "interpreted"]
    # Numbers that never change (betas, weight decay) have stayed constants.
    graph = backend.graphs[-1]
    numbers = {leaf.index for node in graph.nodes for leaf in leaves(node.args) if isinstance(leaf, Number)}
    assert 0 < len(numbers) < len(graph.numbers)


def test_varied_becomes_true_for_the_number_that_changed_and_stays_so() -> None:
    asked: list[tuple[str, bool]] = []

    def refuses(node: Node, number: Number, varied: bool) -> bool:
        asked.append((node.op, varied))
        return True

    x = torch.ones(3).to("tarry")
    with using(Walking(refuses=refuses)):
        for factor in (2.0, 3.0, 4.0):
            (x * factor).sub(x, alpha=5).cpu()
    mul = [varied for op, varied in asked if op == "aten::mul.Tensor"]
    sub = [varied for op, varied in asked if op == "aten::sub.Tensor"]
    assert mul[0] is False
    assert len(mul) > 1
    assert all(mul[1:])
    assert not any(sub)


def test_the_reason_names_operator_line_and_values() -> None:
    x = torch.ones(3).to("tarry")

    def scaled(number: float) -> list[float]:
        return (x * number).tolist()

    with using(Walking(refuses=_refuse_all)), record() as seen:
        scaled(0.125)
        scaled(0.375)
    reasons = [event.fields["reason"] if event.fields["again"] else "" for event in seen if event.kind == "compile"]
    line = scaled.__code__.co_firstlineno + 1
    assert reasons == ["", f"a number of aten::mul.Tensor at {__file__}:{line} was 0.125 and is 0.375 now"]


def test_the_reason_names_the_operator_that_needs_the_value() -> None:
    """A number may be used by several operators; the one that takes it as an input is not to blame."""
    x = torch.ones(3).to("tarry")
    refuses = lambda node, number, varied: node.op == "aten::clamp_max"
    with using(Walking(refuses=refuses)), record() as seen:
        for number in (0.5, 0.25):
            assert (x * number).clamp_max(number).tolist() == [number] * 3
    reasons = [event.fields["reason"] if event.fields["again"] else "" for event in seen if event.kind == "compile"]
    assert len(reasons) == 2
    assert "aten::clamp_max" in reasons[1]
    assert "was 0.5 and is 0.25 now" in reasons[1]


def test_after_too_many_values_the_step_is_interpreted() -> None:
    x = torch.ones(3).to("tarry")
    with using(Walking(refuses=_refuse_all)) as backend, record() as seen:
        for k in range(MAX_VARIANTS + 3):
            assert (x * (k + 0.5)).tolist() == [k + 0.5] * 3
        assert len(backend.graphs) == MAX_VARIANTS
        runs = backend.runs
        assert (x * 0.5).tolist() == [0.5] * 3  # the programs that there are stay in use
        assert backend.runs == runs + 1
    interpreted = [event for event in seen if event.kind == "interpreted"]
    assert len(interpreted) == 3
    assert "aten::mul.Tensor" in interpreted[0].fields["reason"]


def test_interpreting_is_an_error_if_the_user_wants_that() -> None:
    x = torch.ones(3).to("tarry")
    with using(Walking(refuses=_refuse_all)):
        for k in range(MAX_VARIANTS):
            (x * (k + 0.5)).cpu()
        y = x * 100.5
        with tarry.config.override(fallback="error"), pytest.raises(FallbackError, match=r"mul\.Tensor.*test_numbers"):
            y.cpu()
        assert y.tolist() == [100.5] * 3


SPECIAL: list[tuple[Any, Any]] = [
    (0.0, -0.0),
    (-0.0, 0.0),
    (math.nan, 1.0),
    (1.0, math.nan),
    (math.inf, -math.inf),
    (5e-324, 0.0),
    (1e308, math.inf),
    (1, 2),
    (2**53, 2**53 + 1),
    (-(2**63), 2**63 - 1),
    (True, False),
    (1, True),
    (1, 1.0),
    (1.0, True),
    (0, False),
    (0, 0.0),
    (1 + 0j, complex(1, -0.0)),
    (complex(0.0, 1), complex(-0.0, 1)),
    (1j, 2j),
    (1 + 0j, 1.0),
    (complex(math.nan, 1), complex(1, math.nan)),
]


@pytest.mark.parametrize("refuses", [_refuse_all, lambda *_: False], ids=["constants", "inputs"])
@pytest.mark.parametrize(("first", "second"), SPECIAL, ids=[f"{a}-{b}" for a, b in SPECIAL])
@pytest.mark.parametrize("kind", ["wrapped", "fill"])
def test_values_are_told_apart(first: Any, second: Any, kind: str, refuses: Any) -> None:
    dtype = torch.int64 if isinstance(first, int) and isinstance(second, int) else torch.float64
    if isinstance(first, complex):
        dtype = torch.complex128

    def program(number: Any, device: str) -> torch.Tensor:
        x = torch.ones(2, dtype=dtype).to(device)
        return torch.full_like(x, number) if kind == "fill" else torch.where(x == 1, number, x)

    with using(Walking(refuses=refuses)) as backend:
        for number in (first, second, first, second):
            assert _same_bits(program(number, "tarry").cpu(), program(number, "cpu")), number
        expected = 2 if refuses is _refuse_all or type(first) is not type(second) else 1
        assert len(backend.graphs) == expected


def test_nan_is_the_same_as_nan() -> None:
    x = torch.ones(3).to("tarry")
    with using(Walking(refuses=_refuse_all)), expect(compiles=1):
        for _ in range(3):
            assert (x * math.nan).isnan().all().item()


@pytest.mark.parametrize("refuses", [_refuse_all, lambda *_: False], ids=["constants", "inputs"])
def test_seeds_never_recompile(refuses: Any) -> None:
    def program(device: str) -> torch.Tensor:
        x = torch.ones(64).to(device)
        dropped = torch.nn.functional.dropout(x, 0.5)
        return dropped + torch.rand_like(x) + torch.empty_like(x).normal_() + torch.bernoulli(x * 0.5)

    results = []
    with using(Walking(refuses=refuses)), expect(compiles=1):
        for seed in (0, 1, 0, 2):
            torch.manual_seed(seed)
            results.append(program("tarry").cpu())
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])
    torch.manual_seed(0)
    with using("eager"):
        assert torch.equal(program("tarry").cpu(), results[0])


class _Fussy(Walking):
    """Compiles for one value and cannot for another."""

    def compile(self, graph: Graph) -> Any:
        for node in graph.nodes:
            if node.op == "aten::mul.Tensor" and node.args[1] == 3.0:
                raise Unsupported(node, "three is too many")
        return super().compile(graph)


def _events(seen: list[Event], kind: str) -> list[Event]:
    return [event for event in seen if event.kind == kind]


def test_a_value_that_cannot_be_compiled_is_interpreted_and_others_are_not() -> None:
    x = torch.ones(3).to("tarry")
    with using(_Fussy(refuses=_refuse_all)) as backend, record() as seen:
        for factor in (2.0, 3.0, 4.0, 3.0, 2.0):
            assert (x * factor).tolist() == [factor] * 3
    assert len(backend.graphs) == 2
    assert backend.runs == 3
    (first, second) = _events(seen, "interpreted")
    assert first.fields["reason"] == second.fields["reason"]
    assert "three is too many" in first.fields["reason"]
    assert not _events(seen, "error")


def test_a_number_of_an_operator_that_is_not_supported_is_no_reason_to_compile() -> None:
    x = torch.ones(3).to("tarry")
    with using(Walking(refuses=_refuse_all, lacks=["aten::mul.Tensor"])), expect(compiles=1):
        for factor in (2.0, 3.0, 4.0):
            assert (x + x).mul(factor).tolist() == [2 * factor] * 3


def test_numbers_of_arange_decide_its_shape_and_are_another_graph() -> None:
    with using(Walking()):
        for end in (3.0, 5.0, 3.0):
            assert torch.arange(0, end, device="tarry").tolist() == list(range(int(end)))
