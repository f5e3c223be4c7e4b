"""Pieces of a graph: together they compute what the whole computes, and only those share a program that are alike."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import tarry
from tarry.backends.base import Recording
from tarry.ir import Graph, evaluate, verify
from tarry.ir.graph import GraphBuilder
from tarry.ir.text import parse
from tarry.native import C
from tarry.passes.donation import safe_updates
from tarry.passes.pieces import NOWHERE, Pieces, pieces

USES_DEVICE = True
LAYERS = 14

Layer = Callable[[int, str, str], list[str]]


def _layer(k: int, x: str, weight: str) -> list[str]:
    """Nine operators, the last of which gives what the next layer takes."""
    a, b, c, d, e, f, g, h, y = (f"%{k}{n}" for n in range(1, 10))
    return [
        f"{a}: f32[2, 2] = aten::mul.Tensor({x}, {weight})",
        f"{b}: f32[2, 2] = aten::sin({a})",
        f"{c}: f32[2, 2] = aten::cos({b})",
        f"{d}: f32[2, 2] = aten::sub.Tensor({b}, {c}, alpha=1)",
        f"{e}: f32[2, 2] = aten::tanh({d})",
        f"{f}: f32[2, 2] = aten::mm({e}, {a})",
        f"{g}: f32[2, 2] = aten::sigmoid({f})",
        f"{h}: f32[2, 2] = aten::div.Tensor({g}, {e})",
        f"{y}: f32[2, 2] = aten::add.Tensor({x}, {h}, alpha=0.5)",
    ]


def _network(
    layer: Layer = _layer,
    weights: Callable[[int], str] = lambda k: f"%{k}",
    returns: str = "",
    inputs: str = "",
    updates: bool = False,
) -> Graph:
    """Layers with a weight each, %100, %101, ...; layer 10k gives %10k9. Optionally each layer's weight is updated."""
    header = ["%0: f32[2, 2]", "%1: f32[2, 2]", *(f"%{100 + k}: f32[2, 2]" for k in range(LAYERS))]
    lines, x = [], "%0"
    for k in range(100, 100 + LAYERS):
        lines += layer(k, x, weights(k))
        x = f"%{k}9"
    if updates:
        for k in range(100, 100 + LAYERS):
            lines += [f"%9{k}: f32[2, 2] = aten::sub.Tensor(%{k}, %{k}5, alpha=0.5)"]
        returns += "".join(f", %9{k} -> %{k}" for k in range(100, 100 + LAYERS))
    return parse(f"graph({', '.join(header)}{inputs}):\n" + "\n".join(lines) + f"\nreturn {x}{returns}")


def _run(made: Pieces, inputs: list[torch.Tensor], numbers: list[float]) -> list[torch.Tensor]:
    """As a backend would that writes into every input that it may, and hands over what is copied in place of copies."""
    registers: list[torch.Tensor | None] = [*inputs, *([None] * (made.registers - len(inputs)))]
    for call in made.calls:
        graph = made.graphs[call.graph]
        taken = [registers[k] for k in call.takes]
        assert all(tensor is not None for tensor in taken), "it was dropped too early"
        bare, elided = _without_copies(graph)
        results = evaluate(bare, taken, [numbers[k] for k in call.numbers])  # type: ignore[arg-type]
        for k, source in elided.items():
            results[k] = taken[source] if graph.replaces[k] is None else results[k]  # type: ignore[assignment]
        for k, index in enumerate(graph.replaces):
            if index is not None:
                results[k] = taken[index].copy_(results[k])  # type: ignore[union-attr]
        for dead in call.drops:
            registers[dead] = None
        for register, result in zip(call.gives, results, strict=True):
            if register != NOWHERE:
                registers[register] = result
    kept = [registers[k] for k in made.outputs]
    assert len([tensor for tensor in registers if tensor is not None]) <= len(inputs) + len(kept)
    return kept  # type: ignore[return-value]


def _without_copies(graph: Graph) -> tuple[Graph, dict[int, int]]:
    """The graph, and the outputs that are copies of inputs."""
    copies = {node.results[0]: node.operands[0] for node in graph.nodes if node.op == "aten::clone"}
    inputs = {value: k for k, value in enumerate(graph.inputs)}
    return graph, {k: inputs[copies[v]] for k, v in enumerate(graph.outputs) if copies.get(v) in inputs}


def _check(graph: Graph) -> Pieces:
    """The pieces, after a look at what they compute."""
    made = pieces(graph)
    assert made is not None
    for piece in made.graphs:
        verify(piece, thorough=True)
    torch.manual_seed(1)
    inputs = [torch.rand(v.type.sizes).as_strided(v.type.sizes, v.type.strides) for v in graph.inputs]
    numbers = [n.value + 1 if n.kind == "seed" else n.value * 1.5 for n in graph.numbers]
    wanted = evaluate(graph, [tensor.clone() for tensor in inputs], numbers)
    for mine, expected in zip(_run(made, inputs, numbers), wanted, strict=True):
        assert torch.equal(mine, expected)
    return made


def _counts(made: Pieces) -> list[int]:
    """How often each graph is used, most often first."""
    return sorted(Counter(call.graph for call in made.calls).values(), reverse=True)


def test_layers_share_a_graph() -> None:
    made = _check(_network())
    assert _counts(made) == [LAYERS]
    (piece,) = made.graphs
    assert (len(piece.inputs), len(piece.outputs)) == (2, 1), "only what goes from one layer to the next is handed over"


def test_a_graph_in_which_too_little_repeats_stays_whole() -> None:
    def chain(names: list[str]) -> Graph:
        lines = [f"%{k + 1}: f32[2] = aten::{name}(%{k})" for k, name in enumerate(names)]
        return parse("graph(%0: f32[2]):\n" + "\n".join(lines) + f"\nreturn %{len(names)}")

    assert pieces(chain(["sin"] * 100)) is None
    assert pieces(chain(["sin"] * 200)) is not None
    generator = random.Random(0)
    assert pieces(chain([generator.choice(["sin", "cos", "tanh", "exp"]) for _ in range(400)])) is None


def _changed(line: int, old: str, new: str, at: int = 105) -> Layer:
    def layer(k: int, x: str, weight: str) -> list[str]:
        lines = _layer(k, x, weight)
        if k == at:
            assert old.format(k=k) in lines[line]
            lines[line] = lines[line].replace(old.format(k=k), new.format(k=k))
        return lines

    return layer


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        (3, "(%{k}2, %{k}3,", "(%{k}3, %{k}2,"),  # the same labels
        (7, "(%{k}7, %{k}5)", "(%{k}7, %{k}4)"),
        (5, "(%{k}5, %{k}1)", "(%{k}5, %1)"),
        (8, "alpha=0.5", "alpha=-0.5"),
        (8, "alpha=0.5", "alpha=0.0"),
        (1, "aten::sin", "aten::cos"),
    ],
    ids=["crossed wires", "another wire", "another input", "sign", "constant", "operator"],
)
def test_a_layer_that_is_different_has_a_graph_of_its_own(line: int, old: str, new: str) -> None:
    made = _check(_network(_changed(line, old, new)))
    assert _counts(made)[0] == LAYERS - 1
    assert len(made.graphs) == 2


@pytest.mark.parametrize(("value", "kinds"), [("-0.0", 2), ("0.0", 1)])
def test_constants_are_compared_as_what_they_are(value: str, kinds: int) -> None:
    def layer(k: int, x: str, weight: str) -> list[str]:
        scale = value if k == 105 else "0.0"
        return [line.replace("alpha=0.5", f"alpha={scale}") for line in _layer(k, x, weight)]

    assert len(_check(_network(layer)).graphs) == kinds


def test_nan_is_nan() -> None:
    def layer(k: int, x: str, weight: str) -> list[str]:
        lines = _layer(k, x, weight)
        lines[6] = f"%{k}7: f32[2, 2] = aten::nan_to_num(%{k}6, nan, 1.0, 0.0)"
        return lines

    made = pieces(_network(layer))
    assert made is not None
    assert len(made.graphs) == 1


def test_strides_are_part_of_it() -> None:
    graph = _network()
    inputs = list(graph.inputs)
    turned = replace(inputs[7], type=replace(inputs[7].type, strides=(1, 2)))
    text = str(graph).replace(f"%{inputs[7].id}: f32[2, 2]", f"%{inputs[7].id}: f32[2, 2]{{1, 2}}")
    turned_graph = parse(text)
    assert turned_graph.inputs[7].type == turned.type
    assert _counts(_check(turned_graph)) == [LAYERS - 1, 1]


def test_weights_may_be_shared_between_layers() -> None:
    made = _check(_network(weights=lambda k: "%100" if k % 2 else f"%{k}"))
    assert _counts(made) == [LAYERS]


def test_a_layer_whose_inputs_are_one_is_different() -> None:
    """It could be given the same buffer twice; but a program may write to one of its inputs."""
    made = _check(_network(lambda k, x, weight: _layer(k, x, x if k == 105 else weight)))
    assert _counts(made) == [LAYERS - 1, 1]


def test_what_all_layers_read_is_handed_to_each() -> None:
    def layer(k: int, x: str, weight: str) -> list[str]:
        return [line.replace(f"cos(%{k}2)", "cos(%1)") for line in _layer(k, x, weight)]

    assert _counts(_check(_network(layer))) == [LAYERS]


def test_an_intermediate_that_is_returned_is_given_by_all_and_wanted_from_one() -> None:
    made = _check(_network(returns=", %1055"))
    assert _counts(made) == [LAYERS]
    assert sum(NOWHERE in call.gives for call in made.calls) == LAYERS - 1


def test_views_are_made_where_they_are_read_or_returned() -> None:
    """What is made in one layer is looked at by the next; the layer that makes it returns a view of it, too."""

    def layer(k: int, x: str, weight: str) -> list[str]:
        lines = _layer(k, f"%{k}10", weight)
        seen = f"%{k}10: f32[2, 2]{{1, 2}} = aten::permute({x}, [1, 0])"
        last = lines[8].replace(f"%{k}10", f"%{k}1")
        return [seen, *lines[:8], last, f"%{k}11: f32[4] = aten::view(%{k}4, [4])"]

    made = _check(_network(layer, returns=", %10511, %10711"))
    assert _counts(made)[0] == LAYERS - 2
    assert all(node.op == "aten::permute" for node in made.graphs[0].nodes[:1])


def test_updates_stay_in_place() -> None:
    made = _check(_network(updates=True))
    assert sum(len([r for r in made.graphs[call.graph].replaces if r is not None]) for call in made.calls) == LAYERS


def test_what_is_read_later_is_not_updated_before() -> None:
    """Each layer updates its weight at once; the next layer reads the old contents of it."""

    def layer(k: int, x: str, weight: str) -> list[str]:
        before = f"%{max(k - 1, 100)}"
        lines = [line.replace(f"cos(%{k}2)", f"cos({before})") for line in _layer(k, x, weight)]
        return [*lines, f"%9{k}: f32[2, 2] = aten::sub.Tensor(%{k}, %{k}5, alpha=0.5)"]

    updates = "".join(f", %9{k} -> %{k}" for k in range(100, 100 + LAYERS))
    made = _check(_network(layer, returns=updates))
    updated = [r for call in made.calls for r in made.graphs[call.graph].replaces if r is not None]
    assert len(updated) < LAYERS


def test_a_layer_may_read_what_an_earlier_one_has_updated() -> None:
    """The new contents, which lie in the buffer of the old ones."""

    def layer(k: int, x: str, weight: str) -> list[str]:
        before = f"%9{k - 1}" if k > 100 else "%1"
        lines = [line.replace(f"cos(%{k}2)", f"cos({before})") for line in _layer(k, x, weight)]
        return [*lines, f"%9{k}: f32[2, 2] = aten::sub.Tensor(%{k}, %{k}5, alpha=0.5)"]

    made = _check(_network(layer, returns="".join(f", %9{k} -> %{k}" for k in range(100, 100 + LAYERS))))
    assert sum(r is not None for call in made.calls for r in made.graphs[call.graph].replaces) >= LAYERS - 2


def test_copies_of_what_is_updated_keep_the_old_contents() -> None:
    """A compiler may hand over what is copied in place of the copy."""

    def layer(k: int, x: str, weight: str) -> list[str]:
        return [*_layer(k, x, weight), f"%8{k}: f32[2, 2] = aten::clone({weight}, memory_format=None)"]

    _check(_network(layer, updates=True, returns="".join(f", %8{k}" for k in range(100, 100 + LAYERS))))


def test_numbers_and_seeds_are_those_of_each_layer() -> None:
    def layer(k: int, x: str, weight: str) -> list[str]:
        lines = _layer(k, x, weight)
        n = k - 100
        lines[6] = f"(%{k}7: f32[2, 2], %{k}10: b8[2, 2]) = aten::native_dropout(%{k}6, 0.5, True) [${2 * n}=seed({k})]"
        lines[8] = f"%{k}9: f32[2, 2] = aten::add.Tensor({x}, %{k}8, alpha=${2 * n + 1}={n}.5)"
        return lines

    made = _check(_network(layer))
    assert _counts(made) == [LAYERS]
    assert [call.numbers for call in made.calls] == [(2 * k, 2 * k + 1) for k in range(LAYERS)]


def test_what_checkpointing_recomputes_is_alike_whatever_its_number() -> None:
    def layer(k: int, x: str, weight: str) -> list[str]:
        return [
            f"{line} [region={k - 99}]" if "sin" in line or "tanh" in line else line for line in _layer(k, x, weight)
        ]

    made = _check(_network(layer))
    assert _counts(made) == [LAYERS]
    assert {node.region for node in made.graphs[0].nodes} == {0, 1}


def _recorded(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], x: torch.Tensor) -> Graph:
    """The steady state of training, not run."""
    model = model.to("tarry")
    chosen = optimizer(model.parameters())
    there = x.to("tarry")

    def step() -> None:
        model(there).square().mean().backward()
        with torch.no_grad():
            chosen.step()

    step()
    chosen.zero_grad()
    tarry.sync()
    with tarry.config.override(cut_after_optimizer=False):
        step()
        batch = C.collect(0)
        graph = Recording(batch).graph("optimized")
        batch.interpret(interruptible=False)
    return safe_updates(graph)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    ],
    ids=["momentum", "AdamW", "AdamW one by one"],
)
def test_a_training_step(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    blocks = [layer for _ in range(16) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.GELU())]
    graph = _recorded(nn.Sequential(*blocks), optimizer, torch.randn(4, 8))
    made = pieces(graph)
    assert made is not None
    assert len(made.graphs) <= 8 < len(made.calls)
    updated = [r for call in made.calls for r in made.graphs[call.graph].replaces if r is not None]
    assert len(updated) == sum(index is not None for index in graph.replaces), "all stay in place"
    torch.manual_seed(1)
    inputs = [torch.rand(v.type.sizes).as_strided(v.type.sizes, v.type.strides) for v in graph.inputs]
    numbers = [number.value for number in graph.numbers]
    wanted = evaluate(graph, [tensor.clone() for tensor in inputs], numbers)
    for mine, expected in zip(_run(made, inputs, numbers), wanted, strict=True):
        assert torch.equal(mine, expected)


def test_another_depth_has_the_same_pieces() -> None:
    def graphs(depth: int) -> set[Graph]:
        torch.manual_seed(0)
        blocks = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.GELU())]
        made = pieces(_recorded(nn.Sequential(*blocks), torch.optim.AdamW, torch.randn(4, 8)))
        assert made is not None
        return {_without_sites(graph) for graph in made.graphs}

    few, many = graphs(12), graphs(18)
    assert len(few & many) >= 3, "forward, backward and the update of a layer"


def _without_sites(graph: Graph) -> Graph:
    builder = GraphBuilder(graph)
    for node in graph.nodes:
        builder.copy(node, site=None)
    return builder.finish()
