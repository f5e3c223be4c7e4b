"""Cutting a graph in two: both parts together compute what the whole computes, and updates come late."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import tarry
from tarry.backends.base import Recording
from tarry.ir import Graph, evaluate, verify
from tarry.ir.layout import VIEW_RULES
from tarry.ir.text import parse
from tarry.native import C
from tarry.passes.specialize import specialize
from tarry.passes.split import Split, split

USES_DEVICE = True


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    with torch.no_grad():
        optimizer.step()


def _recorded(optimizer: Callable[..., torch.optim.Optimizer], model: nn.Module) -> tuple[Graph, Split | None]:
    """The steady state of training, not run: the optimizer's hook would run it."""
    model = model.to("tarry")
    chosen = optimizer(model.parameters())
    x = torch.randn(4, 8).to("tarry")
    _step(model, chosen, x)
    chosen.zero_grad()
    tarry.sync()
    with tarry.config.override(cut_after_optimizer=False):
        _step(model, chosen, x)
        batch = C.collect(0)
        graph = Recording(batch).graph("optimized")
        numbers = batch.numbers()
        graph = specialize(graph, {k: numbers[k] for k, number in enumerate(graph.numbers) if number.kind != "seed"})
        parts = split(graph, *batch.positions())
        batch.interpret(interruptible=False)
    return graph, parts


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())))


def _compose(parts: Split, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    early = evaluate(parts.early, [inputs[k] for k in parts.early_takes])
    late = evaluate(parts.late, [inputs[k] if k >= 0 else early[-1 - k] for k in parts.late_takes])
    return [late[k] if k >= 0 else early[-1 - k] for k in parts.outputs]


def _inputs(graph: Graph) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.rand(value.type.sizes).as_strided(value.type.sizes, value.type.strides) for value in graph.inputs]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, foreach=False),
    ],
    ids=["SGD", "momentum", "AdamW", "one by one"],
)
def test_a_training_step(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    graph, parts = _recorded(optimizer, _mlp())
    assert parts is not None
    verify(parts.early, thorough=True)
    verify(parts.late, thorough=True)
    inputs = _inputs(graph)
    for mine, wanted in zip(_compose(parts, inputs), evaluate(graph, inputs), strict=True):
        assert torch.equal(mine, wanted)
    # What replaces an input is late, so that it can be written into the input's buffer.
    assert all(parts.outputs[k] >= 0 for k, index in enumerate(graph.replaces) if index is not None)
    updated = [parts.late_takes[index] for index in parts.late.replaces if index is not None]
    assert sorted(updated) == sorted(index for index in graph.replaces if index is not None)
    assert not any(index is not None for index in parts.early.replaces)


def test_running_statistics_do_not_hold_up_the_network() -> None:
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8))))
    graph, parts = _recorded(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), model)
    assert parts is not None
    work = [node for node in graph.nodes if node.op not in VIEW_RULES]
    assert len(parts.early.nodes) > len(work) // 2


def test_a_small_graph_stays_whole() -> None:
    text = """
        graph(%0: f32[2], %1: f32[2]):
          %2: f32[2] = aten::sin(%0)
          %3: f32[2] = aten::add.Tensor(%2, %1, alpha=1)
          return %3
    """
    assert split(parse(text), [0, 9], []) is None


def _chain(first: str, length: int, returned: str) -> str:
    lines = [f"%2: f32[2] = {first}"]
    lines += [f"%{k}: f32[2] = aten::sin(%{k - 1})" for k in range(3, length)]
    lines += [f"%{length}: f32[2] = aten::add.Tensor(%{length - 1}, %1, alpha=1)"]
    return "graph(%0: f32[2], %1: f32[2]):\n" + "\n".join(lines) + f"\nreturn {returned.format(last=length)}"


def test_all_that_waits_for_the_last_input_is_late() -> None:
    parts = split(parse(_chain("aten::sin(%0)", 40, "%{last}")), [0, 100], [])
    assert parts is not None
    assert (len(parts.early.nodes), len(parts.late.nodes)) == (38, 1)
    assert (parts.early_takes, parts.late_takes, parts.outputs) == ((0,), (-1, 1), (0,))
    assert split(parse(_chain("aten::sin(%1)", 40, "%{last}")), [0, 100], []) is None  # all of it waits


def test_a_returned_copy_of_an_input_is_not_made_early() -> None:
    """Inductor may return the input itself for it, and the late part updates that."""
    text = _chain("aten::clone(%0, memory_format=None)", 40, "%2, %{last} -> %0")
    assert split(parse(text), [0, 100], []) is None


def test_activations_are_not_recomputed_before_the_backward_pass_has_come_to_them() -> None:
    """Made early, they would be kept for the late part, which is what recomputing them is to avoid."""
    forward = ["%3: f32[2] = aten::sin(%0)", *(f"%{k}: f32[2] = aten::sin(%{k - 1})" for k in range(4, 23))]
    backward = ["%23: f32[2] = aten::add.Tensor(%22, %1, alpha=1)"]
    again = ["%24: f32[2] = aten::sin(%0) [region=1]"]
    again += [f"%{k}: f32[2] = aten::sin(%{k - 1}) [region=1]" for k in range(25, 44)]
    end = ["%44: f32[2] = aten::mul.Tensor(%43, %23)", "%45: f32[2] = aten::mul.Tensor(%44, %2)"]
    lines = "\n".join([*forward, *backward, *again, *end])
    parts = split(parse(f"graph(%0: f32[2], %1: f32[2], %2: f32[2]):\n{lines}\nreturn %45"), [0, 60, 100], [])
    assert parts is not None
    # By its inputs, all that is recomputed could come before the backward pass has begun.
    assert [node.op for node in parts.early.nodes].count("aten::add.Tensor") == 1
    assert [node.op for node in parts.late.nodes] == ["aten::mul.Tensor"]


def test_what_only_prepares_an_update_is_late() -> None:
    """A weight that decays: early, its product would be a third copy of it. It is known from the start."""
    lines = ["%2: f32[2] = aten::mul.Tensor(%1, %1)", "%3: f32[2] = aten::sin(%0)"]
    lines += [f"%{k}: f32[2] = aten::sin(%{k - 1})" for k in range(4, 40)]
    lines += ["%40: f32[2] = aten::add.Tensor(%39, %2, alpha=1)"]
    graph = parse("graph(%0: f32[2], %1: f32[2]):\n" + "\n".join(lines) + "\nreturn %39, %40 -> %1")
    parts = split(graph, [10, 0], [100])
    assert parts is not None
    assert [node.op for node in parts.late.nodes] == ["aten::mul.Tensor", "aten::add.Tensor"]
    assert parts.early_takes == (0,)


def test_new_statistics_are_made_early_and_written_late() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())]
    graph, parts = _recorded(lambda p: torch.optim.SGD(p, lr=0.1), nn.Sequential(*layers))
    assert parts is not None
    updated = [k for k, index in enumerate(graph.replaces) if index is not None]
    assert len(updated) >= 8 + 8, "weights and statistics"
    assert all(parts.outputs[k] >= 0 for k in updated), "all by the late part"
    assert sum(node.op == "aten::clone" for node in parts.late.nodes) >= 8


class _Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.project(x).view(1, 2, 2, 8)
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout).reshape(4, 8).tanh()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_only_what_draws_waits_for_its_seed(dropout: float) -> None:
    torch.manual_seed(0)
    layers = [_Attention(dropout) for _ in range(6)]
    _, parts = _recorded(lambda p: torch.optim.SGD(p, lr=0.1), nn.Sequential(*layers))
    assert parts is not None
    assert any(node.seed is not None for node in parts.early.nodes)
    assert bool(parts.seeds) == (dropout > 0)


def test_a_device_that_would_be_idle_gets_more_of_the_work_early() -> None:
    """Half is known at 0; a little later, all but one."""
    lines = [f"%{k}: f32[2] = aten::sin(%{0 if k == 3 else k - 1})" for k in range(3, 25)]
    lines += ["%25: f32[2] = aten::add.Tensor(%24, %1, alpha=1)"]
    lines += [f"%{k}: f32[2] = aten::sin(%{k - 1})" for k in range(26, 44)]
    lines += ["%44: f32[2] = aten::add.Tensor(%43, %2, alpha=1)"]
    graph = parse("graph(%0: f32[2], %1: f32[2], %2: f32[2]):\n" + "\n".join(lines) + "\nreturn %44")
    half, most = split(graph, [0, 10, 100], []), split(graph, [0, 10, 100], [], little_late=True)
    assert half is not None
    assert most is not None
    assert (len(half.early.nodes), len(most.early.nodes)) == (22, 41)
