"""On tarry: one node with the right shapes, no fallback, the same results as in eager, with each backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tarry
from tarry.events import expect
from tests.custom_ops.operators import axpy_, cube, diagonal
from tests.support import fallbacks

USES_DEVICE = True


@pytest.fixture(params=["eager", "torchscript", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    before = tarry.get_backend()
    tarry.set_backend(request.param)
    yield request.param
    tarry.set_backend(before)


def test_one_node() -> None:
    x = torch.ones(2, 3, device="tarry")
    op = cube()
    tarry.mark_step()
    graph = tarry.graph(op(x))
    assert [node.op for node in graph.nodes] == ["optest::cube"]
    assert graph.outputs[0].type == graph.inputs[0].type


class Net(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.first, self.last, self.op = nn.Linear(4, 8), nn.Linear(8, 1), op

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.op(torch.tanh(self.first(x))))


def _train(device: str) -> list[Any]:
    torch.manual_seed(0)
    net = Net(cube()).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    x, y = torch.randn(16, 4).to(device), torch.randn(16, 1).to(device)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [torch.tensor(losses), *(parameter.detach().cpu() for parameter in net.parameters())]


def test_a_model_is_trained(backend: str) -> None:
    expected = _train("cpu")
    found = _train("tarry")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not fallbacks()
    assert not tarry.metrics.counters().get("interpreted", 0)


def test_writes(backend: str) -> None:
    def program(device: str) -> list[Any]:
        op = axpy_()
        x, y = torch.arange(6.0).to(device).view(2, 3), torch.ones(2, 3).to(device)
        version = y._version
        op(x, y, 2.0)
        assert y._version > version
        before = y * 10
        op(x[:, 1:], y[:, :2], -1.0)  # through views
        op(y[0], y[1], 1.0)
        return [y.tolist(), before.tolist()]

    assert program("tarry") == program("cpu")
    assert not fallbacks()


def test_a_write_is_seen_by_autograd() -> None:
    x = torch.ones(3, device="tarry", requires_grad=True)
    y = x * 2
    z = y * y  # saves y
    with torch.no_grad():
        axpy_()(torch.ones(3, device="tarry"), y.detach(), 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_views(backend: str) -> None:
    def program(device: str) -> list[Any]:
        x = torch.zeros(3, 3).to(device)
        seen = diagonal()(x[:2, :2])
        seen.add_(1)
        diagonal()(x).mul_(3)
        return [x.tolist(), seen.tolist(), seen._is_view()]

    assert program("tarry") == program("cpu")
    assert not fallbacks()


def test_a_view_records_nothing() -> None:
    x = torch.zeros(3, 3, device="tarry")
    op = diagonal()
    tarry.mark_step()
    before = tarry.native.C.counters(0)["record"]
    op(x)
    assert tarry.native.C.counters(0)["record"] == before


def test_random_numbers(backend: str) -> None:
    @tarry.custom_op("optest::noisy", tags=torch.Tag.nondeterministic_seeded)
    def noisy(x: Tensor) -> Tensor: ...

    noisy.impl("cpu")(lambda x: x + torch.rand(x.shape))
    noisy.impl_abstract()(torch.empty_like)
    x = torch.zeros(4, device="tarry")

    def draw() -> list[list[float]]:
        torch.manual_seed(3)
        return [noisy(x).tolist(), noisy(x).tolist()]

    first, second = draw()
    assert first != second
    assert draw() == [first, second]
    assert not fallbacks()


def test_a_size_that_depends_on_data_is_a_cut_with_its_line() -> None:
    @tarry.custom_op("optest::positives")
    def positives(x: Tensor) -> Tensor: ...

    positives.impl("cpu")(lambda x: x[x > 0])

    @positives.impl_abstract()
    def _(x):
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    x = torch.tensor([1.0, -1.0, 2.0]).to("tarry")
    assert (positives(x * 2) + 1).tolist() == [3.0, 5.0]
    assert fallbacks() == {"optest::positives": 1}


def test_numbers_may_decide_shapes() -> None:
    @tarry.custom_op("optest::resampled")
    def resampled(x: Tensor, factor: float) -> Tensor: ...

    resampled.impl("cpu")(lambda x, factor: x.new_full((int(len(x) * factor),), factor))
    resampled.impl_abstract()(lambda x, factor: x.new_empty(int(len(x) * factor)))
    x = torch.ones(4, device="tarry")
    for factor in (0.5, 1.5, 0.5, 1.6, 2.0):
        result = resampled(x, factor)
        assert result.shape == (int(4 * factor),)
        assert result.tolist() == pytest.approx([factor] * int(4 * factor))


@pytest.mark.parametrize(
    ("backend", "programs"), [("torchscript", 1), pytest.param("inductor", 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("writes", [False, True], ids=["pure", "writes"])
def test_a_number_that_does_not_is_no_new_graph(backend: str, programs: int, writes: bool) -> None:
    def scaled(x: Tensor, k: float, n: int | float) -> Tensor: ...

    op = tarry.custom_op("optest::scaled", mutates_args=("x",) if writes else ())(scaled)

    @op.impl("cpu")
    def _(x, k, n):
        assert type(k) is float
        assert type(n) is int
        return (x.add_(1) if writes else x + 1) * k * n

    op.impl_abstract()(lambda x, k, n: torch.empty_like(x))
    before = tarry.get_backend()
    tarry.set_backend(backend)
    try:
        with expect(compiles=programs, fallbacks=0):
            for step in range(1, 12):
                x = torch.ones(2).to("tarry")
                assert op(x, step / 4, step).tolist() == [step * step / 2] * 2
                assert x.tolist() == [2.0 if writes else 1.0] * 2
    finally:
        tarry.set_backend(before)
    assert not tarry.metrics.counters().get("interpreted", 0)


def test_a_mistake_surfaces_at_its_line() -> None:
    @tarry.custom_op("optest::choosy")
    def choosy(x: Tensor) -> Tensor: ...

    @choosy.impl_abstract()
    def _(x):
        raise ValueError("choosy takes matrices")

    choosy.impl("cpu")(torch.clone)
    with pytest.raises(ValueError, match="choosy takes matrices"):
        choosy(torch.ones(2, device="tarry"))


def test_forced_to_run_eagerly() -> None:
    x = torch.ones(2, device="tarry")
    tarry.config.force_fallback = {"optest::cube"}
    try:
        with expect(fallbacks=1):
            cube()(x)  # declared after the setting
    finally:
        tarry.config.force_fallback = set()
    with expect(fallbacks=0):
        cube()(x)


def test_an_abstract_implementation_that_comes_late_is_heard() -> None:
    @tarry.custom_op("optest::late")
    def late(x: Tensor) -> Tensor: ...

    late.impl("cpu")(torch.clone)
    x = torch.ones(2, device="tarry")
    with expect(fallbacks=1):
        late(x).tolist()
    late.impl_abstract()(torch.empty_like)
    with expect(fallbacks=0):
        late(x).tolist()


def test_a_list_of_results_and_an_absent_tensor(backend: str) -> None:
    @tarry.custom_op("optest::halves")
    def halves(x: Tensor, w: Tensor | None, parts: int) -> tuple[list[Tensor], Tensor]: ...

    @halves.impl("cpu")
    def _(x, w, parts):
        return [x * (k + 1) for k in range(parts)], x.sum() if w is None else w.clone()

    halves.impl_abstract()(
        lambda x, w, parts: ([torch.empty_like(x) for _ in range(parts)], x.new_empty(()) if w is None else w.clone())
    )
    x = torch.ones(2, device="tarry")
    parts, rest = halves(x, None, 3)
    assert [part.tolist() for part in parts] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert rest.item() == 2.0
    assert not fallbacks()
