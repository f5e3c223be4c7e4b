"""All passes together, on programs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tarry.errors import IRError
from tarry.ir import Graph, from_raw, parse, to_text
from tarry.passes import DEFAULT, Pass, run, run_pipeline
from tests.ir.strategies import draw_program
from tests.passes.check import check_stages, kept_operators, record

PROGRAM = """\
graph(%0: f32[4, 8], %1: f32[8]):
  %2: f32[8] = tarry::strided_view(%0, f32, [8], [1], 8)  # train.py:1
  %3: f32[8] = aten::add_.Tensor(%2, %1, alpha=$0=1)  # train.py:1
  %4: f32[4, 8] = tarry::strided_scatter(%0, %3, f32, [8], [1], 8)  # train.py:1
  %5: f32[8] = aten::add.Tensor(%1, %1, alpha=$1=1)  # train.py:2
  %6: f32[8] = aten::mul.Tensor(%1, %1)  # train.py:3
  %7: f32[8] = aten::mul.Tensor(%1, %1)  # train.py:4
  return %4 -> %0, %6, %7"""


def test_every_stage_by_its_name() -> None:
    stages = run_pipeline(parse(PROGRAM), check=True)
    assert stages.names == ("recorded", "functional", "views", "cse", "dce", "joined", "owned", "optimized")
    assert to_text(stages["recorded"]) == PROGRAM
    assert (
        to_text(stages["functional"])
        == """\
graph(%0: f32[4, 8], %1: f32[8]):
  %2: f32[8] = tarry::strided_view(%0, f32, [8], [1], 8)  # train.py:1
  %3: f32[8] = aten::add.Tensor(%2, %1, alpha=$0=1)  # train.py:1
  %4: f32[4, 8] = tarry::strided_scatter(%0, %3, f32, [8], [1], 8)  # train.py:1
  %5: f32[8] = aten::add.Tensor(%1, %1, alpha=$1=1)  # train.py:2
  %6: f32[8] = aten::mul.Tensor(%1, %1)  # train.py:3
  %7: f32[8] = aten::mul.Tensor(%1, %1)  # train.py:4
  return %4 -> %0, %6, %7"""
    )
    assert (
        to_text(stages["dce"])
        == """\
graph(%0: f32[4, 8], %1: f32[8]):
  unused $1=1
  %2: f32[8] = aten::select.int(%0, 0, 1)  # train.py:1
  %3: f32[8] = aten::add.Tensor(%2, %1, alpha=$0=1)  # train.py:1
  %4: f32[4, 8] = aten::select_scatter(%0, %3, 0, 1)  # train.py:1
  %5: f32[8] = aten::mul.Tensor(%1, %1)  # train.py:3
  return %4 -> %0, %5, %5"""
    )
    assert (
        to_text(stages.optimized)
        == """\
graph(%0: f32[4, 8], %1: f32[8]):
  unused $1=1
  %2: f32[8] = aten::select.int(%0, 0, 1)  # train.py:1
  %3: f32[8] = aten::add.Tensor(%2, %1, alpha=$0=1)  # train.py:1
  %4: f32[4, 8] = aten::select_scatter(%0, %3, 0, 1)  # train.py:1
  %5: f32[8] = aten::mul.Tensor(%1, %1)  # train.py:3
  %6: f32[8] = aten::clone(%5)  # train.py:3
  return %4 -> %0, %5, %6"""
    )


def test_run_stops_at_the_stage_asked_for() -> None:
    graph = parse(PROGRAM)
    stages = run_pipeline(graph)
    for name in stages.names:
        assert run(graph, name) == stages[name]
    with pytest.raises(
        ValueError, match="no stage 'fast'; there are recorded, functional, views, cse, dce, joined, owned, opt"
    ):
        run(graph, "fast")
    with pytest.raises(KeyError, match="no stage 'fast'"):
        stages["fast"]


def _drop_output(graph: Graph) -> Graph:
    return Graph(graph.inputs, graph.numbers, graph.nodes, graph.outputs[1:], graph.replaces[1:])


def test_a_pass_may_not_change_the_signature() -> None:
    broken = (Pass("drop", _drop_output, "recorded"),)
    with pytest.raises(IRError, match="pass 'drop' changed the signature"):
        run_pipeline(parse(PROGRAM), broken, check=True)


def test_verification_is_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = (Pass("nothing", lambda graph: graph, "functional"),)
    run_pipeline(parse(PROGRAM), lazy)
    monkeypatch.setenv("TARRY_VERIFY", "1")
    with pytest.raises(IRError, match="rule 'no-mutation'"):
        run_pipeline(parse(PROGRAM), lazy)


@given(st.data())
@settings(max_examples=150)
def test_random_programs_keep_their_meaning(data: st.DataObject) -> None:
    check_stages(draw_program(data.draw))


@given(st.data())
@settings(max_examples=60)
def test_passes_have_nothing_to_do_the_second_time(data: st.DataObject) -> None:
    stages = run_pipeline(from_raw(draw_program(data.draw).raw()))
    for step in DEFAULT:
        assert step.run(stages[step.name]) == stages[step.name]


class Small(nn.Module):
    """A bit of everything that writes: batch norm, dropout, in-place activations, slices of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.register_buffer("cache", torch.zeros(4, 6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(self.norm(self.convolution(x)))
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([x, x], -1)
        x, _ = self.attention(x, x, x)
        with torch.no_grad():
            self.cache[:, 1:3].copy_(x[:, :2])
        return self.head(x.mean(1))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adam foreach", "adamw fused"])
def test_training_steps_keep_their_meaning(optimizer: str) -> None:
    torch.manual_seed(0)
    model = Small()
    parameters = list(model.parameters())
    chosen = {
        "sgd": lambda: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False),
        "adam": lambda: torch.optim.Adam(parameters, foreach=False),
        "adam foreach": lambda: torch.optim.Adam(parameters, foreach=True, amsgrad=True),
        "adamw fused": lambda: torch.optim.AdamW(parameters, fused=True),
    }[optimizer]()
    x, y = torch.randn(4, 2, 4, 5), torch.randint(0, 3, (4,))

    def step() -> None:
        chosen.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        chosen.step()

    step()
    stages = check_stages(record(step))
    # Dropout on an activation whose dimensions are permuted draws in the order of its strides; see docs/ir.md.
    assert set(kept_operators(stages.optimized)) <= {"aten::bernoulli_.float"}
