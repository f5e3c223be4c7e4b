"""A backend that knows only some operators: the rest runs on the real device, in few parts, and is counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tarry
from tarry.backends.base import Computation
from tarry.backends.partition import partition
from tarry.errors import BackendError, FallbackError
from tarry.events import expect, record
from tarry.events.text import short
from tarry.ir.evaluate import run_node
from tarry.ir.graph import Graph, Node, Value
from tarry.ir.layout import VIEW_RULES, same_addresses
from tarry.ir.text import parse
from tarry.ir.verify import verify
from tests.backends.simple import Walking, using

USES_DEVICE = True
CPU = torch.device("cpu")


# ---- the cut itself


def _parts(text: str, lacks: set[str]) -> list[tuple[list[str], bool]]:
    graph = parse(text)
    parts = partition(graph, lambda node: node.op not in lacks)
    return [([node.op for node in part.nodes], part.graph is not None) for part in parts]


def test_what_is_not_needed_yet_is_put_off() -> None:
    """sin and neg could come before tanh; then there would be three parts."""
    text = """
        graph(%0: f32[2]):
          %1: f32[2] = aten::sin(%0)
          %2: f32[2] = aten::tanh(%0)
          %3: f32[2] = aten::neg(%1)
          %4: f32[2] = aten::add.Tensor(%2, %3, alpha=1)
          return %4
    """
    assert _parts(text, {"aten::tanh"}) == [
        (["aten::tanh"], False),
        (["aten::sin", "aten::neg", "aten::add.Tensor"], True),
    ]


def test_the_last_part_may_be_of_either_kind() -> None:
    text = """
        graph(%0: f32[2]):
          %1: f32[2] = aten::sin(%0)
          %2: f32[2] = aten::tanh(%1)
          %3: f32[2] = aten::neg(%0)
          return %2, %3
    """
    assert _parts(text, {"aten::tanh"}) == [(["aten::sin", "aten::neg"], True), (["aten::tanh"], False)]


def test_alternating_operators_are_alternating_parts() -> None:
    text = """
        graph(%0: f32[2]):
          %1: f32[2] = aten::sin(%0)
          %2: f32[2] = aten::tanh(%1)
          %3: f32[2] = aten::sin(%2)
          %4: f32[2] = aten::tanh(%3)
          return %4
    """
    assert [known for _, known in _parts(text, {"aten::tanh"})] == [True, False, True, False]


def _fewest(graph: Graph, known: Callable[[Node], bool]) -> int:
    """The longest chain of changes between the two kinds; one more if such chains begin with either."""
    best: dict[bool, int] = {}
    for first in (True, False):
        depth: dict[Value, int] = dict.fromkeys(graph.inputs, 0)
        for node in graph.nodes:
            place = max((depth[value] for value in node.operands), default=0)
            place += place % 2 != (known(node) is not first)
            depth.update(dict.fromkeys(node.results, place))
        used = {depth[node.results[0]] for node in graph.nodes}
        best[first] = len(used) if 0 in used else max(used, default=0)
    return min(best.values())


def _random_graph(seed: int) -> Graph:
    draw = random.Random(seed)
    lines, count = [], 2
    for _ in range(draw.randint(1, 20)):
        a, b = draw.randrange(count), draw.randrange(count)
        calls = [f"aten::sin(%{a})", f"aten::tanh(%{a})", f"aten::mul.Tensor(%{a}, %{b})", f"aten::atan2(%{a}, %{b})"]
        lines.append(f"  %{count}: f32[2] = {draw.choice(calls)}\n")
        count += 1
    returned = ", ".join(f"%{k}" for k in sorted(draw.sample(range(2, count), draw.randint(1, count - 2))))
    return parse(f"graph(%0: f32[2], %1: f32[2]):\n{''.join(lines)}  return {returned}")


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_are_cut_rightly_and_into_few_parts(seed: int) -> None:
    graph = _random_graph(seed)
    supports = lambda node: node.op in ("aten::sin", "aten::mul.Tensor")
    parts = partition(graph, supports)
    assert len(parts) <= _fewest(graph, supports)
    assert {id(node) for part in parts for node in part.nodes} == {id(node) for node in graph.nodes}
    inputs = [torch.rand(2), torch.rand(2)]
    whole: dict[Value, torch.Tensor] = dict(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes:
        run_node(node, whole, [], CPU)
    environment: dict[Value, torch.Tensor] = dict(zip(graph.inputs, inputs, strict=True))
    for part in parts:
        local = {value: environment[value] for value in part.takes}
        if part.graph is None:
            assert not any(supports(node) for node in part.nodes)
            for node in part.nodes:
                run_node(node, local, [], CPU)
            environment.update((value, local[value]) for value in part.gives)
        else:
            verify(part.graph, "optimized")
            assert all(supports(node) or node.op == "aten::clone" for node in part.graph.nodes)
            inner = dict(zip(part.graph.inputs, local.values(), strict=True))
            for node in part.graph.nodes:
                run_node(node, inner, [], CPU)
            environment.update(
                (value, inner[result]) for value, result in zip(part.gives, part.graph.outputs, strict=True)
            )
        for value in part.drops:
            del environment[value]
    for value in graph.outputs:
        assert torch.equal(environment[value], whole[value])


# ---- as a user sees it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.batch = nn.BatchNorm1d(5)
        self.out = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        a, b = self.batch(self.conv(x)).chunk(2, dim=-1)
        x = torch.cat([a.sigmoid(), F.gelu(b)], dim=-1)
        values, _ = x.sort(dim=1)
        return self.out(x + values).log_softmax(-1)


def _train(device: str, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(3)
    net = Block().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses = []
    for k in range(steps):
        ids = ((torch.arange(20).view(4, 5) * (k + 1)) % 11).to(device)
        loss = F.nll_loss(net(ids).flatten(0, 1), ids.flatten() % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*(loss.cpu() for loss in losses), *(value.cpu() for value in net.state_dict().values())]


def _close(mine: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


SUPPORTED: dict[str, dict[str, Any]] = {
    "elementwise only": {"only": ["aten::add.Tensor", "aten::mul.Tensor", "aten::sigmoid", "aten::sub.Tensor"]},
    "no views": {"lacks": list(VIEW_RULES)},
    "no normalisation": {
        "lacks": [
            "aten::native_layer_norm",
            "aten::native_layer_norm_backward",
            "aten::_native_batch_norm_legit_functional",
            "aten::native_batch_norm_backward",
        ]
    },
    "no matrix product": {"lacks": ["aten::addmm", "aten::mm"]},
    "no optimizer": {"lacks": ["aten::addcdiv", "aten::lerp.Scalar", "aten::addcmul", "aten::_foreach_mul.Scalar"]},
    "nothing": {"only": []},
    "views only": {"only": list(VIEW_RULES)},
    "every other operator": {
        "lacks": ["aten::sort", "aten::cat", "aten::gelu", "aten::convolution", "aten::embedding"]
    },
}


@pytest.mark.parametrize("supported", SUPPORTED.values(), ids=SUPPORTED)
def test_training_gives_the_same_whatever_is_supported(supported: dict[str, Any]) -> None:
    expected = _train("cpu")
    with using(Walking(**supported)):
        _close(_train("tarry"), expected)


@pytest.mark.parametrize("seed", range(6))
def test_training_with_random_gaps(seed: int) -> None:
    expected = _train("cpu")
    with using(Walking()) as backend:
        _train("tarry", 2)
        known = sorted(set(backend.operators))
    lacking = random.Random(seed).sample(known, len(known) // 3)
    with using(Walking(lacks=lacking)):
        _close(_train("tarry"), expected)


def test_a_view_goes_where_it_is_read() -> None:
    """It costs nothing, so it is no reason for a part of its own; what it looks at crosses the cut. One that leaves out
    elements is made where the elements are."""
    text = """
        graph(%0: f32[2, 3]):
          %1: f32[3, 2]{1, 3} = aten::permute(%0, [1, 0])
          %2: f32[3, 2]{1, 3} = aten::tanh(%1)
          %3: f32[2, 3] = aten::permute(%2, [1, 0])
          %4: f32[2, 3] = aten::sin(%3)
          %5: f32[2, 3] = aten::tanh(%3)
          %6: f32[3] = aten::select.int(%4, 0, 1)
          %7: f32[3] = aten::tanh(%6)
          return %5, %7
    """
    assert _parts(text, {"aten::tanh"}) == [
        (["aten::permute", "aten::tanh"], False),
        (["aten::permute", "aten::sin", "aten::select.int"], True),
        (["aten::permute", "aten::tanh", "aten::tanh"], False),
    ]


def test_views_that_are_returned() -> None:
    def program(device: str) -> list[torch.Tensor]:
        x = torch.arange(6.0).view(2, 3).to(device)
        tarry.mark_step()
        return [x.sin().t(), x.tanh().t().unsqueeze(0), x.view(6)[2:4].clone().view(2, 1)]

    expected = program("cpu")
    for lacks in ([], ["aten::tanh"], ["aten::sin"], ["aten::permute"], ["aten::clone"], ["aten::clone", "aten::sin"]):
        with using(Walking(lacks=lacks)):
            for mine, wanted in zip(program("tarry"), expected, strict=True):
                assert torch.equal(mine.cpu(), wanted)


def test_few_parts() -> None:
    x = torch.ones(3, 3).to("tarry")
    with using(Walking(lacks=["aten::tanh"])) as backend, expect(compiles=1, fallbacks=2):
        y = (x.sin() + 1).tanh()
        z = (x.cos() + 2).tanh()
        w = (y + z).exp()
        tarry.mark_step()
    assert len(backend.graphs) == 2
    ones = torch.ones(3, 3)
    torch.testing.assert_close(w.cpu(), ((ones.sin() + 1).tanh() + (ones.cos() + 2).tanh()).exp())


def test_fallbacks_are_counted_with_the_users_line() -> None:
    x = torch.ones(3).to("tarry")
    with using(Walking(lacks=["aten::tanh"])), record() as seen:
        line = test_fallbacks_are_counted_with_the_users_line.__code__.co_firstlineno + 4
        y = x.sin().tanh().neg()
        for _ in range(2):
            y.cpu()
    (event,) = [event for event in seen if event.kind == "fallback"]
    assert event.fields["op"] == "aten::tanh"
    assert (event.fields["file"], event.fields["line"]) == (__file__, line)
    assert "'walking' does not support it" in event.fields["reason"]
    assert tarry.metrics.counters()["fallback/aten::tanh"] == 1
    assert f"{short(__file__)}:{line}" in tarry.metrics.report()


def test_views_that_an_operator_on_the_real_device_reads_are_no_fallbacks() -> None:
    x = torch.arange(6.0).view(2, 3).to("tarry")
    with using(Walking(lacks=["aten::tanh"])) as backend, record() as seen:
        torch.testing.assert_close((x.t() + 1).t().tanh().cpu(), (torch.arange(6.0).view(2, 3) + 1).tanh())
    assert [event.fields["op"] for event in seen if event.kind == "fallback"] == ["aten::tanh"]
    assert len(backend.graphs) == 1


def test_fallbacks_happen_at_every_run_and_compile_once() -> None:
    x = torch.ones(3).to("tarry")
    with using(Walking(lacks=["aten::tanh"])), expect(compiles=1, fallbacks=4, cache_hits=3):
        for _ in range(4):
            x.sin().tanh().neg().cpu()


def test_fallback_error_names_operator_and_line_and_loses_nothing() -> None:
    x = torch.ones(3).to("tarry")
    with using(Walking(lacks=["aten::tanh"])) as backend:
        y = x.sin().tanh().neg()
        with (
            tarry.config.override(fallback="error"),
            expect(fallbacks=0),
            pytest.raises(FallbackError, match=r"aten::tanh[\s\S]*'walking' does not support it \(at .*test_partition"),
        ):
            y.cpu()
        assert backend.runs == 0
        torch.testing.assert_close(y.cpu(), torch.ones(3).sin().tanh().neg())
        # Once compiled, the setting is still looked at.
        z = x.sin().tanh().neg()
        with tarry.config.override(fallback="error"), pytest.raises(FallbackError):
            z.cpu()
        assert torch.equal(z.cpu(), y.cpu())
        with tarry.config.override(fallback="error"):
            assert x.sin().tolist() == torch.ones(3).sin().tolist()


def test_an_unsupported_graph_is_an_error_as_well() -> None:
    class Fussy(Walking):
        def compile(self, graph: Graph) -> Any:
            raise tarry.Unsupported(graph.nodes[0], "not today")

    x = torch.ones(3).to("tarry")
    with using(Fussy()):
        y = x.sin()
        with (
            tarry.config.override(fallback="error"),
            pytest.warns(UserWarning, match="not today"),
            pytest.raises(FallbackError, match=r"aten::sin at .*test_partition.py:\d+.*not today"),
        ):
            y.cpu()
        with record() as seen:
            assert y.tolist() == torch.ones(3).sin().tolist()
        assert [event.fields["reason"] for event in seen if event.kind == "interpreted"]


def test_operators_with_several_outputs_on_either_side() -> None:
    def program(device: str) -> list[torch.Tensor]:
        x = torch.arange(12.0).view(3, 4).sin().to(device)
        values, indices = x.sort(dim=1)
        top, where = (values + 1).topk(2, dim=0)
        q, r = torch.linalg.qr(top)
        return [values, indices, top * 2, where, q @ r, r, x.gather(1, indices)]

    expected = program("cpu")
    for lacks in (["aten::sort"], ["aten::topk"], ["aten::linalg_qr"], ["aten::sort", "aten::linalg_qr"]):
        with using(Walking(lacks=lacks)):
            for mine, wanted in zip(program("tarry"), expected, strict=True):
                torch.testing.assert_close(mine.cpu(), wanted)


def test_outputs_straight_from_the_real_device_do_not_alias() -> None:
    x = torch.arange(6.0).to("tarry")
    with using(Walking(only=["aten::add.Tensor"])):
        y = x.view(2, 3).t().contiguous()
        z = x.clone()
        w = z.neg()
        tarry.mark_step()
        z.zero_()
        y.fill_(7)
        assert x.tolist() == [0, 1, 2, 3, 4, 5]
        assert w.tolist() == [-0.0, -1, -2, -3, -4, -5]
        assert y.tolist() == [[7, 7]] * 3


class Contiguous(Walking):
    """Gives every result contiguous, whatever strides were recorded, and wants its inputs as their types say."""

    def compile(self, graph: Graph) -> Any:
        super().compile(graph)

        def run(inputs: list[Any], numbers: list[Any]) -> list[Any]:
            for tensor, value in zip(inputs, graph.inputs, strict=True):
                assert same_addresses(value.type.sizes, tensor.stride(), value.type.strides)
                assert tensor.storage_offset() == 0
            return [result.contiguous() for result in self.walk(graph, inputs, numbers)]

        return run


def test_views_across_parts_start_where_they_should() -> None:
    """A view has an offset into another tensor's buffer; a part that takes it must not see that."""

    def program(device: str) -> list[torch.Tensor]:
        x = torch.arange(24.0).view(4, 6).to(device)
        part = x.exp()[1:, 2:]
        other = part.sin()[1]
        again = other.tanh().as_strided((2, 2), (1, 1), 1)
        return [again.neg(), part.t().cos(), other.view(2, 2).tanh()[:, 1] + 1]

    expected = program("cpu")
    gaps = (["aten::exp"], ["aten::sin", "aten::cos"], ["aten::tanh"], ["aten::as_strided"], ["aten::select.int"])
    for lacks in gaps:
        with using(Contiguous(lacks=lacks)):
            for mine, wanted in zip(program("tarry"), expected, strict=True):
                torch.testing.assert_close(mine.cpu(), wanted)


def test_strides_are_put_right_between_parts() -> None:
    def program(device: str) -> list[torch.Tensor]:
        x = torch.arange(24.0).view(2, 3, 4).to(device)
        a = x.permute(2, 0, 1).sin()  # keeps the permuted strides
        b = a.tanh()
        c = torch.stack([b, a]).transpose(0, 3).exp()
        return [a, b, c, c.tanh().view(torch.int32)]

    expected = program("cpu")
    for lacks in (["aten::tanh"], ["aten::sin", "aten::exp"], ["aten::view.dtype"]):
        with using(Contiguous(lacks=lacks)):
            for mine, wanted in zip(program("tarry"), expected, strict=True):
                torch.testing.assert_close(mine.cpu(), wanted)
                assert mine.stride() == wanted.stride()


def test_kept_and_random_nodes_run_on_either_side() -> None:
    def program(device: str) -> list[torch.Tensor]:
        torch.manual_seed(5)
        x = torch.ones(40).to(device)
        wide = torch.logsumexp(x.view(4, 10), 0, out=torch.empty(10, dtype=torch.float64, device=device))  # kept
        dropped = F.dropout(x, 0.4)
        noise = torch.rand_like(x) + torch.empty_like(x).normal_()
        return [wide.sin(), dropped.exp(), noise.sin(), torch.randperm(9, device=device)]

    with using("eager"):
        expected = [value.cpu() for value in program("tarry")]
    with using(Walking()) as backend:
        _alive = program("tarry")
        tarry.mark_step()
        assert any(node.kept for graph in backend.graphs for node in graph.nodes)
        random_ops = {node.op for graph in backend.graphs for node in graph.nodes if node.seed or "rand" in node.op}
    gaps = [["aten::sin"], ["aten::exp"], sorted(random_ops), ["aten::logsumexp.out"], ["aten::normal_functional"]]
    for lacks in gaps:
        with using(Contiguous(lacks=lacks)):
            for mine, wanted in zip(program("tarry"), expected, strict=True):
                assert torch.equal(mine.cpu(), wanted), lacks


def test_numbers_reach_operators_on_the_real_device() -> None:
    x = torch.ones(3).to("tarry")
    with using(Walking(lacks=["aten::mul.Tensor"])), expect(compiles=1):
        for factor in (2.0, 3.5, -1.0):
            assert (x.mul(factor) + factor).tolist() == [2 * factor] * 3


@pytest.mark.parametrize("fault", ["count", "dtype", "shape", "object"])
def test_a_part_that_gives_nonsense_is_named(fault: str) -> None:
    class Faulty(Walking):
        def compile(self, graph: Graph) -> Any:
            made = super().compile(graph)
            run = made.run if isinstance(made, Computation) else made

            def wrong(inputs: list[Any], numbers: list[Any]) -> list[Any]:
                (result,) = run(inputs, numbers)
                return {"count": [], "dtype": [result.double()], "shape": [result[None]], "object": ["?"]}[fault]

            return wrong

    x = torch.ones(3).to("tarry")
    messages = {
        "count": "it gave 0 results for 1 outputs",
        "dtype": r"by .*aten::sin.*test_partition.py:\d+ gave f64\[3\] instead of f32\[3\]",
        "shape": r"by .*aten::sin.*test_partition.py:\d+ gave f32\[1, 3\] instead of f32\[3\]",
        "object": r"by .*aten::sin.*test_partition.py:\d+ gave a str, not a tensor",
    }
    with using(Faulty(lacks=["aten::tanh"])):
        y = x.sin().tanh()
        with pytest.raises(BackendError, match=f"'walking'[\\s\\S]*{messages[fault]}"):
            y.cpu()
        torch.testing.assert_close(y.cpu(), torch.ones(3).sin().tanh())


def test_an_operator_that_fails_on_the_real_device_is_the_programs_error() -> None:
    table = torch.ones(3, 2).to("tarry")
    with using(Walking(lacks=["aten::embedding"])):
        good = table + 1
        bad = F.embedding(torch.tensor([5]).to("tarry"), table)
        with pytest.raises(IndexError, match=r"aten::embedding, recorded at .*test_partition\.py:\d+"):
            bad.cpu()
        assert good.tolist() == [[2.0, 2.0]] * 3


def test_explain_shows_the_parts() -> None:
    x = torch.ones(3).to("tarry")
    with using(Walking(lacks=["aten::tanh"])):
        text = tarry.explain(x.sin().tanh().neg(), stage="compiled")
    places = [text.index(piece) for piece in ("aten::sin", "on the real device:", "aten::tanh", "aten::neg")]
    assert places == sorted(places)
