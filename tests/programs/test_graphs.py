"""What ends up in which graph: compiles, cuts and cache hits of programs that others got wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import DEVICE, assert_same, counters, dev, expect, step, tarry_only

USES_DEVICE = True
pytestmark = tarry_only


def test_the_same_program_compiles_once() -> None:
    def program() -> list[float]:
        x = torch.arange(4.0, device=DEVICE)
        return ((x * 2 + 1).relu() - x).tolist()

    with expect(compiles=1):
        first = program()
    with expect(compiles=0, executes=1, cache_hits=1):
        assert program() == first


def test_the_key_does_not_depend_on_order_of_creation() -> None:
    """A logger that holds an extra tensor, created earlier or later, is the same set of outputs."""

    def program(early: bool) -> tuple[list[float], list[float]]:
        x = torch.arange(4.0, device=DEVICE)
        if early:
            kept = x * 2
            out = x + 1
        else:
            out = x + 1
            kept = x * 2
        step()
        return out.tolist(), kept.tolist()

    assert program(True) == program(False)
    with expect(compiles=0):
        program(True)
        program(False)


def test_numbers_are_inputs() -> None:
    x = dev(torch.arange(3.0))
    step()

    def program(a: float, b: int) -> list[float]:
        return (x * a + b).tolist()

    program(1.5, 2)
    program(2.5, 3)
    with expect(compiles=0):
        for i in range(5):
            assert program(i * 0.5, i) == [i * 0.5 * v + i for v in (0.0, 1.0, 2.0)]


def test_a_number_that_is_special_is_not_folded_wrongly() -> None:
    x = dev(torch.tensor([1.0, -2.0, 0.0]))
    for number in (0, 1, -1, 2.0, 0.5, float("inf"), float("nan")):
        assert_same(x * number, torch.tensor([1.0, -2.0, 0.0]) * number)
        assert_same(x**number, torch.tensor([1.0, -2.0, 0.0]) ** number)
        assert_same(x.clamp(min=number), torch.tensor([1.0, -2.0, 0.0]).clamp(min=number))


def test_a_cut_in_the_middle_applies_updates_once() -> None:
    norm = nn.BatchNorm1d(2, momentum=0.5).to(DEVICE)
    counter = torch.zeros(1, device=DEVICE)
    x = dev(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    counter.add_(1)
    y = norm(x)
    assert y.shape == (2, 2)
    y.sum().item()
    torch.nonzero(x)  # runs eagerly, which cuts as well
    step()
    counter.add_(1)
    assert counter.item() == 2.0
    assert_same(norm.running_mean, torch.tensor([1.0, 2.0]))
    assert norm.num_batches_tracked.item() == 1


def test_dead_values_are_not_computed() -> None:
    x = dev(torch.ones(4))
    step()
    for _ in range(5):
        (x @ x).sin()
    kept = x + 1
    with expect(executes=1):
        kept.tolist()
    import tarry

    y = x * 3
    text = tarry.explain(y)
    assert "mul" in text
    assert "sin" not in text


def test_growing_cache_does_not_compile_each_token_for_good() -> None:
    """A second generation of the same length finds every graph of the first in the cache."""
    torch.manual_seed(0)
    proj = nn.Linear(8, 8).to(DEVICE)

    def generate() -> list[float]:
        keys = torch.zeros(1, 0, 8, device=DEVICE)
        token = torch.ones(1, 1, 8, device=DEVICE)
        with torch.no_grad():
            for _ in range(6):
                keys = torch.cat([keys, proj(token)], dim=1)
                token = F.scaled_dot_product_attention(token, keys, keys)
                token.sum().item()
        return token.flatten().tolist()

    first = generate()
    with expect(compiles=0, fallbacks=0):
        assert generate() == first


def test_growing_cache_compiles_a_constant_number_of_times() -> None:
    def tokens(n: int) -> None:
        keys = torch.zeros(1, 0, 8, device=DEVICE)
        for _ in range(n):
            keys = torch.cat([keys, torch.ones(1, 1, 8, device=DEVICE)], dim=1)
            keys.sum().item()

    tokens(4)
    before = counters().get("compile", 0)
    tokens(12)
    assert counters().get("compile", 0) - before <= 2


def test_recording_is_capped() -> None:
    import tarry

    with tarry.config.override(max_pending_nodes=50):
        x = torch.zeros(2, device=DEVICE)
        for _ in range(400):
            x = x + 1
        assert counters().get("sync", 0) >= 4
        assert x.tolist() == [400.0, 400.0]


def test_deep_graphs_do_not_overflow_the_stack() -> None:
    x = torch.zeros(2, device=DEVICE)
    for _ in range(30000):
        x = x + 1
    assert x.tolist() == [30000.0, 30000.0]
    y = torch.zeros(2, device=DEVICE)
    for _ in range(30000):
        y = y + 1
    del y  # a long chain of nodes goes at once


def test_fallbacks_are_counted_with_their_line() -> None:
    import tarry

    x = dev(torch.tensor([0.0, 1.0]))
    with expect(fallbacks=1) as events:
        torch.nonzero(x)
    fallback = next(e for e in events if e.kind == "fallback")
    assert "nonzero" in str(fallback)
    assert "test_graphs.py" in str(fallback)
    assert any(key.startswith("fallback/aten::nonzero") for key in tarry.metrics.counters())
    assert "test_graphs.py" in tarry.metrics.report()


def test_forced_fallback_gives_the_same() -> None:
    import tarry

    x = dev(torch.arange(3.0))
    with tarry.config.override(force_fallback={"aten::mul.Tensor"}):
        y = x * x
        with expect(fallbacks=0):
            assert y.tolist() == [0.0, 1.0, 4.0]
    assert tarry.metrics.counters()["fallback/aten::mul.Tensor"] == 1


def test_step_closures_run_after_the_step() -> None:
    import tarry

    seen: list[float] = []
    loss = torch.ones(3, device=DEVICE).sum()
    tarry.add_step_closure(lambda value: seen.append(value.item()), loss)
    assert seen == []
    tarry.mark_step(wait=True)
    assert seen == [3.0]


def test_sync_of_some_tensors() -> None:
    import tarry

    a, b = torch.ones(2, device=DEVICE) + 1, torch.ones(2, device=DEVICE) + 2
    tarry.sync(a)
    with expect(executes=0):
        assert a.tolist() == [2.0, 2.0]
    assert b.tolist() == [3.0, 3.0]
    tarry.wait()


def test_explain_names_operators_and_lines() -> None:
    import tarry

    x = dev(torch.arange(3.0))
    y = torch.sigmoid(x * 2)
    recorded = tarry.explain(y, stage="recorded")
    optimized = tarry.explain(y, stage="optimized")
    assert "sigmoid" in recorded
    assert "mul" in recorded
    assert "test_graphs.py" in recorded
    assert "sigmoid" in optimized
    assert tarry.graph(y) is not None
    with expect(executes=1):
        y.tolist()


def test_parameters_are_updated_in_their_buffers() -> None:
    """Nothing but the values of a parameter may change in a step: views of it, and its identity, stay."""
    w = nn.Parameter(dev(torch.ones(3)))
    view = w.detach()
    optimizer = torch.optim.SGD([w], lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        (w * 2).sum().backward()
        optimizer.step()
    assert_same(view, torch.full((3,), -5.0))
    assert view.untyped_storage()._cdata == w.untyped_storage()._cdata


def test_copies_taken_before_an_update_keep_the_old_value() -> None:
    w = dev(torch.ones(3))
    old = w.clone()
    also_old = w * 1
    w.add_(1)
    step()
    older: list[Tensor] = [old, also_old]
    w.add_(1)
    assert_same(older, [torch.ones(3), torch.ones(3)])
    assert_same(w, torch.full((3,), 3.0))
