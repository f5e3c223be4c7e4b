"""The TorchScript backend: the bits of eager, numbers and seeds as inputs, updates in place, readable graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tarry
from tarry.backends.lowering import post_order
from tarry.backends.torchscript import TorchScriptBackend, TSData, TSLoweringContext
from tarry.errors import BackendError, Unsupported
from tarry.events import expect, record
from tarry.examples.train_gpt import GPT, GPTConfig
from tarry.ir.evaluate import evaluate
from tarry.ir.graph import Node
from tarry.ir.layout import TensorType
from tarry.ir.text import parse
from tarry.native import C

USES_DEVICE = True
pytestmark = pytest.mark.usefixtures("torchscript")


def _run(text: str, *inputs: Tensor, device: str = "cpu") -> tuple[list[Tensor], str]:
    """The outputs of a graph, given as text, by this backend, and its TorchScript text."""
    graph = parse(text)
    made = TorchScriptBackend(device).compile(graph)
    results = list(made.run(list(inputs), [number.value for number in graph.numbers]))
    for k in made.in_place:
        replaced = graph.replaces[k]
        assert replaced is not None
        results[k] = inputs[replaced]
    return results, made.backend_text


def _same_as_evaluate(text: str, *inputs: Tensor) -> str:
    expected = evaluate(parse(text), [tensor.clone() for tensor in inputs])
    actual, dump = _run(text, *inputs)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)
    return dump


# ---- training


class Classifier(nn.Module):
    """Convolution, batch norm, dropout, a linear layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 36, 3)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.dropout(F.relu(self.norm(self.conv(x))).flatten(1), self.dropout, self.training))
        return out


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


def _gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=11, layers=2, width=16, heads=2, context=8))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "mlp": (_mlp, lambda: (torch.randn(5, 6), torch.randint(3, (5,)))),
    "gpt": (_gpt, lambda: (torch.randint(11, (2, 8)), torch.randint(11, (2, 8)))),
    "convnet": (Classifier, lambda: (torch.randn(5, 2, 8, 8), torch.randint(3, (5,)))),
    "dropout": (lambda: Classifier(0.3), lambda: (torch.randn(5, 2, 8, 8), torch.randint(3, (5,)))),
}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def _train(
    name: str, device: str, steps: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _adamw
) -> list[Tensor]:
    build, batch = PROGRAMS[name]
    torch.manual_seed(0)
    model = build().to(device)
    x, y = (tensor.to(device) for tensor in batch())
    chosen = optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, steps)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        chosen.zero_grad()
        loss.backward()
        chosen.step()
        schedule.step()
        losses.append(loss.detach())
    return [loss.cpu() for loss in losses] + [value.detach().cpu() for value in model.state_dict().values()]


@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet"])
@pytest.mark.parametrize("optimizer", [_momentum, _adamw])
def test_training_is_that_of_eager(name: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    with expect(fallbacks=0, errors=0):
        actual = _train(name, "tarry", 5, optimizer)
    for a, e in zip(actual, _train(name, "cpu", 5, optimizer), strict=True):
        torch.testing.assert_close(a, e)


def _fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def test_a_fused_optimizer_is_compiled() -> None:
    with record() as seen:
        actual = _train("mlp", "tarry", 4, _fused)
    assert not any(event.kind in ("interpreted", "fallback", "error") for event in seen)
    for a, e in zip(actual, _train("mlp", "cpu", 4, _fused), strict=True):
        torch.testing.assert_close(a, e)


def test_dropout_draws_the_same_bits_as_the_reference_path() -> None:
    with expect(fallbacks=0, errors=0):
        actual = _train("dropout", "tarry", 4)
    tarry.set_backend("eager")
    for a, e in zip(actual, _train("dropout", "tarry", 4), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.slow
def test_a_hundred_steps_with_a_schedule_compile_twice() -> None:
    with expect(compiles=2, fallbacks=0, errors=0):
        _train("gpt", "tarry", 100)


# ---- numbers and seeds


def test_numbers_change_without_another_program() -> None:
    x = torch.arange(4, dtype=torch.float32, device="tarry")
    tarry.mark_step()

    def program(a: float, b: float, c: int) -> list[float]:
        values: list[float] = ((x * a).clamp(max=b) + c).tolist()
        return values

    assert program(2.0, 5.0, 1) == [1.0, 3.0, 5.0, 6.0]
    with expect(compiles=0, cache_hits=2):
        assert program(0.5, 1.0, 0) == [0.0, 0.5, 1.0, 1.0]
        assert program(-1.0, -2.0, 3) == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("number", [2, 2.5, True, 1.5 - 2j])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(3,), ()])
def test_a_number_promotes_as_one(dtype: torch.dtype, number: complex, shape: tuple[int, ...]) -> None:
    cpu = torch.full(shape, 3, dtype=dtype)
    x = cpu.to("tarry")
    condition = torch.ones(shape, dtype=torch.bool)
    for expected, actual in (
        (cpu + number, x + number),
        (cpu * number, x * number),
        (torch.where(condition, cpu, number), torch.where(condition.to("tarry"), x, number)),
        (torch.full_like(cpu, number), torch.full_like(x, number)) if not isinstance(number, complex) else (cpu, x),
    ):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)


def test_the_generators_of_the_user_are_left_alone() -> None:
    x = torch.ones(100, device="tarry")
    tarry.mark_step()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with expect(fallbacks=0):
        mask, noise = F.dropout(x, 0.5), torch.rand_like(x)
        tarry.mark_step()
    assert torch.equal(torch.rand(3), expected)
    assert 20 < int((mask == 0).sum()) < 80
    assert noise.unique().numel() > 50


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.5),
        torch.rand_like,
        torch.bernoulli,
        lambda x: torch.randn(7, device=x.device),
        lambda x: x.clone().exponential_(),
        lambda x: torch.randperm(9, device=x.device),
        lambda x: x.t().clone().bernoulli_(0.5),
    ],
    ids=["dropout", "rand_like", "bernoulli", "randn", "exponential_", "randperm", "bernoulli_"],
)
def test_random_operators_draw_what_the_reference_path_draws(draw: Callable[[Tensor], Tensor]) -> None:
    def program() -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.full((6, 4), 0.5, device="tarry")
        return [draw(x).cpu(), draw(x).cpu()]

    with expect(fallbacks=0):
        actual = program()
    tarry.set_backend("eager")
    for a, e in zip(actual, program(), strict=True):
        assert torch.equal(a, e)


# ---- reading


def test_the_text_shows_operators_parameters_and_numbers() -> None:
    x = torch.ones(2, 3, device="tarry")
    tarry.mark_step()
    text = tarry.explain(torch.relu(x @ x.t()) * 2.5, stage="compiled")
    for part in ("%p0 : Tensor", "%n0 : float", "aten::mm(", "aten::permute(", "aten::relu", "aten::mul"):
        assert part in text


_TWO = """graph(%0: f32[2, 3], %1: f32[3]):
  %2: f32[2, 3] = aten::mul.Tensor(%0, %1)
  %3: f32[2, 3] = aten::exp(%2)
  %4: f32[2, 3] = aten::neg(%2)
  return %3, %4
"""


def test_lowering_can_be_partial() -> None:
    graph = parse(_TWO)
    context = TSLoweringContext(graph)
    first, second = graph.outputs
    context.lower(post_order(graph, [first]))
    assert context.emitted_nodes == 2
    text = str(context.builder.graph)
    assert "aten::exp" in text
    assert "aten::neg" not in text
    rest = TSLoweringContext(graph, context.emitted, into=context.builder.graph)
    rest.lower(post_order(graph, [second]))
    assert rest.emitted_nodes == 1
    assert rest.parameters == []
    rest.add_result(second)
    made = rest.build()
    x, y = torch.randn(2, 3), torch.randn(3)
    (result,) = made.run([x, y], [])[:1]
    torch.testing.assert_close(result, -(x * y))
    assert str(context.builder.graph).count("aten::mul") == 1


def test_the_context_knows_parameters_results_and_aliases() -> None:
    graph = replace(parse(_TWO), replaces=(0, None))
    context = TSLoweringContext(graph)
    context.lower()
    assert len(context.parameters) == 2
    assert len(context.results) == 2
    assert context.aliases == {0: 0}
    assert context.emitted_nodes == 3


def test_data_handles_hold_tensors_and_numbers() -> None:
    backend = TorchScriptBackend()
    type_ = TensorType.contiguous(torch.float32, ())
    empty = backend.placeholder(type_)
    with pytest.raises(BackendError, match="has no value"):
        _ = empty.data
    number = TSData(type_, backend, scalar=2.5)
    assert number.data.item() == 2.5
    empty.assign(number)
    assert empty.has_value
    assert empty.handle == number.handle
    assert empty.data is number.data


def test_an_operator_that_torchscript_does_not_know_is_named() -> None:
    graph = parse(_TWO)
    node = graph.nodes[1]
    strange = Node("aten::exp", (*node.args, 1), node.outputs)
    with pytest.raises((Unsupported, ValueError)):
        TorchScriptBackend().compile(replace(graph, nodes=(graph.nodes[0], strange, graph.nodes[2])))


# ---- what a graph means


def test_views_of_results_with_unknown_strides() -> None:
    dump = _same_as_evaluate(
        """graph(%0: f32[2, 6]):
  %1: f32[2, 6] = aten::exp(%0)
  %2: f32[3, 4] = aten::view(%1, [3, 4])
  %3: i32[3, 4] = aten::view.dtype(%2, i32)
  %4: f32[2, 3]{6, 2} = aten::as_strided(%1, [2, 3], [6, 2], 1)
  %5: f32[2, 6] = aten::as_strided_scatter(%1, %4, [2, 3], [6, 2], 0)
  %6: f32[2, 2, 3]{0, 6, 2} = aten::expand(%4, [2, 2, 3], implicit=False)
  %7: f32[2, 2, 3] = aten::clone(%6, memory_format=contiguous_format)
  %8: i32[3, 4] = aten::clone(%3)
  return %5, %7, %8
""",
        torch.randn(2, 6),
    )
    assert "aten::reshape" in dump  # the kernel's strides are its own affair
    assert "aten::view(%p0" not in dump


def test_windows_on_an_input_are_counted_from_its_start() -> None:
    _same_as_evaluate(
        """graph(%0: f32[12]):
  %1: f32[6] = aten::slice.Tensor(%0, 0, 3, 9, 1)
  %2: f32[2, 2]{2, 1} = aten::as_strided(%1, [2, 2], [2, 1], 1)
  %3: f32[2, 2] = aten::neg(%2)
  return %3
""",
        torch.arange(12.0),
    )


def test_kept_nodes_run_on_copies() -> None:
    _same_as_evaluate(
        """graph(%0: f32[3, 2], %1: f32[3, 2]{1, 3}):
  %2: f32[3, 2] = aten::copysign_.Tensor(%0, %1) [kept]
  %3: f32[3, 2]{1, 3} = aten::fmod_.Tensor(%1, %0) [kept]
  %4: f32[3, 2] = aten::add.Tensor(%0, %2, alpha=1)
  return %2, %3, %4
""",
        torch.randn(3, 2),
        torch.randn(2, 3).t(),
    )


def test_lists_of_tensors_absent_tensors_and_numbers() -> None:
    _same_as_evaluate(
        """graph(%0: f32[3, 4], %1: i64[2], %2: f32[3, 4]):
  %3: f32[3, 2] = aten::index.Tensor(%0, [None, %1])
  (%4: f32[3, 4], %5: f32[3, 4]) = aten::_foreach_mul.ScalarList([%0, %2], [$0=2.5, $1=-1])
  (%6: f32[3, 4], %7: f32[3, 4]) = aten::_foreach_add.Scalar([%4, %5], $2=3)
  %8: f32[6, 4] = aten::cat([%6, %7], 0)
  return %3, %8
""",
        torch.randn(3, 4),
        torch.tensor([3, 0]),
        torch.randn(3, 4),
    )


# ---- writing in place


@pytest.mark.parametrize("optimizer", [_momentum, _adamw, _fused])
def test_parameters_and_state_are_updated_in_their_buffers(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    net = nn.Linear(4, 4).to("tarry")
    chosen = optimizer(net)
    addresses = []
    for _ in range(4):
        chosen.zero_grad()
        net(torch.ones(2, 4, device="tarry")).square().sum().backward()
        chosen.step()
        state = [value for value in chosen.state[net.weight].values() if value.dim() > 0]
        addresses.append([C.materialise(value.detach()).data_ptr() for value in (net.weight, *state)])
    assert addresses[1:] == addresses[1:2] * 3  # the first step makes the state


def test_a_snapshot_does_not_change_with_the_parameter() -> None:
    x = torch.ones(4, device="tarry")
    tarry.mark_step()
    snapshot = C.materialise(x)
    x.mul_(3.5)
    tarry.mark_step()
    assert snapshot.tolist() == [1.0] * 4
    assert x.tolist() == [3.5] * 4


def test_an_index_out_of_range_names_the_line_and_leaves_the_model_as_it_was() -> None:
    net = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 1)).to("tarry")
    optimizer = _momentum(net)

    def step(ids: list[list[int]]) -> None:
        loss = net(torch.tensor(ids, device="tarry")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tarry.wait()

    for _ in range(2):
        step([[0, 1], [2, 3]])
    before = {name: value.cpu() for name, value in net.state_dict().items()}
    with pytest.raises(IndexError, match=r"aten::embedding, recorded at .*test_torchscript\.py:\d+"):
        step([[0, 9], [1, 2]])
    for name, value in net.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name


# ---- CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet"])
def test_training_on_cuda(name: str) -> None:
    """With momentum: AdamW makes steps of a whole rate from the rounding errors that are the gradient of a bias before
    a normalisation."""
    tarry.set_backend("torchscript", device="cuda")
    with expect(fallbacks=0, errors=0):
        actual = _train(name, "tarry", 4, _momentum)
    for a, e in zip(actual, _train(name, "cpu", 4, _momentum), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_dropout_on_cuda_draws_the_same_bits_as_the_reference_path() -> None:
    def draws() -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.ones(64, device="tarry")
        return [F.dropout(x, 0.5).cpu(), torch.rand_like(x).cpu(), torch.bernoulli(x * 0.5).cpu()]

    tarry.set_backend("torchscript", device="cuda")
    actual = draws()
    tarry.set_backend("eager", device="cuda")
    assert all(torch.equal(a, e) for a, e in zip(actual, draws(), strict=True))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_batch_norm_with_one_frozen_parameter(frozen: str) -> None:
    """The meta kernel promises a gradient that the mask turns off."""

    def gradient(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm2d(4).to(device)
        getattr(norm, frozen).requires_grad_(False)
        x, w = torch.randn(2, 4, 5, 5).to(device), torch.randn(2, 4, 5, 5).to(device)
        (norm(x) * w).sum().backward()
        (found,) = (p.grad for p in norm.parameters() if p.requires_grad)
        assert found is not None
        return found.cpu()

    torch.testing.assert_close(gradient("tarry"), gradient("cpu"))


@pytest.mark.parametrize("shape", [(1,), (3, 1), (1, 4)])
def test_bytes_of_a_tensor_whose_dimensions_have_free_strides(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape).to("tarry")
    x.copy_(torch.arange(4.0).to("tarry").sum())  # an expanded scalar: its strides are 0
    assert copy.deepcopy(x).tolist() == x.tolist() == torch.full(shape, 6.0).tolist()
