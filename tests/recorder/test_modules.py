"""Module paths: in which torch.nn.Module each node was recorded."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tarry
from tarry.events import record

USES_DEVICE = True


def _helper(y: Tensor) -> Tensor:
    return y.softmax(-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def later(y: Tensor) -> Tensor:  # so that `self` is a cell
            found: Tensor = self.qkv(y)
            return found

        return _helper(later(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.attn(x))


class Network(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def _x() -> Tensor:
    return torch.ones(2, 4, device="tarry")


def _modules(*tensors: Tensor) -> dict[str, list[str]]:
    """Per operator, the modules in which it was recorded, in order."""
    found: dict[str, list[str]] = {}
    for node in tarry.graph(*tensors).nodes:
        if node.site is not None:
            found.setdefault(node.op.removeprefix("aten::"), []).append(node.site.module)
    return found


def test_forward_and_backward() -> None:
    model = Network().to("tarry")
    loss = model(_x())
    loss.backward()
    gradient = model.blocks[0].attn.qkv.weight.grad  # type: ignore[union-attr, attr-defined]
    assert isinstance(gradient, Tensor)
    found = _modules(loss, gradient)
    names = [f"model.blocks.{k}" for k in range(2)]
    assert found["addmm"] == [f"{name}.{leaf}" for name in names for leaf in ("attn.qkv", "mlp.0")]
    assert found["_softmax"] == [f"{name}.attn" for name in names]
    assert found["add.Tensor"][:2] == names
    assert found["sum"] == ["model"]
    assert found["_softmax_backward_data"] == ["model.blocks.1.attn", "model.blocks.0.attn"]
    assert found["gelu_backward"] == ["model.blocks.1.mlp.1", "model.blocks.0.mlp.1"]


class Trainer:
    """Has its model as an attribute, as frameworks do."""

    def __init__(self) -> None:
        self.network = Network().to("tarry")

    def step(self) -> Tensor:
        found: Tensor = self.network(_x())
        return found


def test_an_attribute_and_a_part_of_a_model() -> None:
    trainer = Trainer()
    assert _modules(trainer.step())["sum"] == ["network"]
    model = Network().to("tarry")
    assert _modules(model.blocks[1](_x()))["_softmax"] == ["model.blocks.1.attn"]
    assert set(_modules(nn.Linear(4, 4).to("tarry")(_x()))["addmm"]) == {"Linear"}


def test_what_is_outside_of_modules_has_none() -> None:
    assert _modules(_x() * 3)["mul.Tensor"] == [""]


def test_an_error_and_an_event_name_the_module() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x)

    model = Lookup().to("tarry")
    bad = model(torch.tensor([7], device="tarry"))
    with pytest.raises(IndexError) as caught:
        bad.tolist()
    assert any("in model.table" in note for note in getattr(caught.value, "__notes__", [])) or (
        "in model.table" in str(caught.value)
    )

    class Finder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nonzero(x)

    finder = Finder()
    with record() as seen:
        finder(_x())
    (fallback,) = [event for event in seen if event.kind == "fallback"]
    assert fallback.fields["module"] == "finder"
    assert fallback.fields["file"] == __file__


def test_the_hash_does_not_know_modules() -> None:
    tarry.set_backend("torchscript", compile="wait")
    with tarry.events.expect(compiles=1):
        for _ in range(2):
            model = Network(1).to("tarry").requires_grad_(False)
            model(_x()).item()
            other = model
            del model
            del other


def test_a_dead_modules_address_is_not_mistaken() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    class Second(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    for _ in range(50):
        first: nn.Module = First()
        assert _modules(first(_x()))["sin"] == ["first"]
        del first
        gc.collect()
        second: nn.Module = Second()
        assert _modules(second(_x()))["sin"] == ["second"]
        del second
        gc.collect()


def test_two_models_of_one_class_in_turn() -> None:
    one, two = Attention().to("tarry"), Attention().to("tarry")
    for _ in range(3):
        assert _modules(one(_x()))["_softmax"] == ["one"]
        tarry.mark_step()
        assert _modules(two(_x()))["_softmax"] == ["two"]
        tarry.mark_step()


def test_naming_keeps_nothing_alive() -> None:
    model = Network(1).to("tarry")

    def loop() -> weakref.ref[Tensor]:
        big = torch.ones(7, device="tarry")
        held = weakref.ref(big)
        model(_x())
        before = big
        del big
        before = torch.tensor([1])  # rebinding must free what the name held
        assert before.item() == 1
        assert held() is None
        return held

    assert loop()() is None


class Odd(nn.Module):
    """Forward as a generator, called on another thread, with odd names."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a b:1 in c": nn.Linear(4, 4)})

    def pieces(self, x: Tensor) -> Iterator[Tensor]:
        for part in self.parts.values():
            yield part(x)

    def forward(self, x: Tensor) -> Tensor:
        return next(iter(self.pieces(x)))


def test_odd_names_survive_the_text_form() -> None:
    from tarry.ir.text import parse, to_text

    model = Odd().to("tarry")
    graph = tarry.graph(model(_x()))
    assert parse(to_text(graph)) == graph
    (site,) = {node.site.module for node in graph.nodes if node.op == "aten::addmm" and node.site}
    assert site == "model.parts.a_b_1_in_c"


def test_on_other_threads_at_once() -> None:
    models = [Network(1).to("tarry") for _ in range(4)]
    found: list[Any] = []

    def work(model: nn.Module) -> None:
        found.extend(set(_modules(model(_x()))["_softmax"]) for _ in range(20))

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{"model.blocks.0.attn"}] * 80


def test_a_hook_on_a_gradient_has_its_tensors_module() -> None:
    class Hooked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            y.register_hook(lambda gradient: gradient.cosh())
            return y

    model = Hooked()
    x = _x().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert _modules(x.grad)["cosh"] == ["model"]


def train(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found


def test_a_function_is_given_its_model() -> None:
    assert _modules(train(Network(1).to("tarry"), _x()))["sum"] == ["model"]
