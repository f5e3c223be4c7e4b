"""The tutorial for authors of backends: its backend is short and trains as eager does, and all its examples run."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tarry
from tarry.events import expect

USES_DEVICE = True
PAGE = Path(__file__).parent.parent.parent / "docs" / "write-a-backend.md"
MOST_LINES = 60


@pytest.fixture(autouse=True)
def _back_to_eager() -> Iterator[None]:
    yield
    tarry.set_backend("eager")


def _blocks() -> list[tuple[int, str]]:
    """Python blocks of the page with the line on which each begins. Blocks marked `continued` use those before them."""
    text = PAGE.read_text()
    found = re.finditer(r"^```python( continued)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(2)].count("\n") + 1, match[2]) for match in found]


def _execute(line: int, source: str, names: dict[str, Any]) -> None:
    """Run a block so that a failure shows the line of the page."""
    exec(compile("\n" * (line - 1) + source, str(PAGE), "exec", dont_inherit=True), names)


@pytest.fixture
def tutorial() -> dict[str, Any]:
    """The names that the page's first block defines."""
    names: dict[str, Any] = {"__name__": "tutorial"}
    _execute(*_blocks()[0], names)
    return names


def test_every_example_runs() -> None:
    blocks = _blocks()
    assert len(blocks) > 15
    names: dict[str, Any] = {"__name__": "tutorial"}
    for line, source in blocks:
        _execute(line, source, names)


def test_the_backend_is_as_short_as_the_page_promises() -> None:
    _, source = _blocks()[0]
    lines = [line for line in source.splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 120


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}

# What has to be left of a training step after decompositions. Operators on lists keep their names: the backend takes
# them apart itself.
FORWARD_AND_BACKWARD = """
    addmm amax div.Tensor exp full gather log mm ne.Scalar neg permute relu scatter.value sub.Tensor sum
    sum.dim_IntList threshold_backward view where.self
"""
UPDATES = {
    "sgd": "_foreach_add.List _foreach_mul.Scalar",
    "adamw": """
        _foreach_add.Scalar _foreach_addcdiv.ScalarList _foreach_addcmul.Scalar _foreach_div.ScalarList
        _foreach_lerp.Scalar _foreach_mul.Scalar _foreach_sqrt
    """,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_backend_trains_an_mlp_as_eager_does(tutorial: dict[str, Any], optimizer: str) -> None:
    compiled: Counter[str] = Counter()

    class Watched(tutorial["NumpyBackend"]):  # type: ignore[misc]
        def compile(self, graph: Any) -> Any:
            compiled.update(node.op.removeprefix("aten::") for node in graph.nodes)
            return super().compile(graph)

    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    x, y = torch.randn(16, 20), torch.randint(5, (16,))

    def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
        chosen = OPTIMIZERS[optimizer](net.parameters())
        losses = []
        for _ in range(6):
            loss = F.cross_entropy(net(x), y)
            chosen.zero_grad()
            loss.backward()
            chosen.step()
            losses.append(loss.item())
        return losses

    theirs, ours = copy.deepcopy(model), copy.deepcopy(model)
    expected = train(theirs, x, y)
    tarry.set_backend(Watched())
    ours.to("tarry")
    moved = x.to("tarry"), y.to("tarry")
    with expect(compiles=2, fallbacks=0, errors=0) as seen:
        actual = train(ours, *moved)
    assert not [event for event in seen if event.kind == "interpreted"]
    assert actual == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    for (name, value), other in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(other.cpu(), value, msg=lambda text, name=name: f"{name}: {text}")
    native = {name.removeprefix("aten::") for name in tutorial["LOWERINGS"]} | set(UPDATES[optimizer].split())
    assert {*FORWARD_AND_BACKWARD.split(), *UPDATES[optimizer].split()} <= set(compiled) <= native


def test_the_rest_falls_back(tutorial: dict[str, Any]) -> None:
    tarry.set_backend(tutorial["NumpyBackend"]())
    x = torch.randn(2, 3, 8, 8)
    weight = torch.randn(4, 3, 3, 3)
    expected = F.max_pool2d(F.conv2d(x, weight), 2).exp().to(torch.bfloat16) * 2
    moved = x.to("tarry"), weight.to("tarry")
    with expect(errors=0) as seen:
        actual = (F.max_pool2d(F.conv2d(*moved), 2).exp().to(torch.bfloat16) * 2).cpu()
    torch.testing.assert_close(actual, expected)
    fell = {event.fields["op"] for event in seen if event.kind == "fallback"}
    assert {"aten::convolution", "aten::max_pool2d_with_indices"} <= fell
    assert "aten::exp" not in fell
