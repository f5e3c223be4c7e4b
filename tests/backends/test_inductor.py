"""The Inductor backend: whole steps, updated in place, right where Inductor is known to go wrong."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tarry
from tarry.backends.inductor import InductorBackend, why_not
from tarry.events import expect, record
from tarry.examples.train_gpt import GPT, GPTConfig
from tarry.native import C
from tests.models.supervised import graph_network
from tests.support.scripts import run_script

USES_DEVICE = True
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not("cpu")), reason="Inductor does not work here"),
]


@pytest.fixture(autouse=True)
def _backend() -> Iterator[None]:
    tarry.set_backend("inductor")
    yield
    tarry.set_backend("eager")


class Classifier(nn.Module):
    """A little of everything that trains: convolution, batch norm, dropout, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.dropout(F.relu(self.norm(self.conv(x))).flatten(1), 0.2, self.training))
        return out


def _train(build: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], device: str, steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    x, y = batch[0].to(device), batch[1].to(device)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return [loss.cpu() for loss in losses] + [p.detach().cpu() for p in model.state_dict().values()]


def test_a_convnet_trains_as_on_the_reference_path_in_two_compiles() -> None:
    batch = torch.randn(5, 2, 8, 8), torch.randint(3, (5,))
    with expect(compiles=2, fallbacks=0, errors=0):
        actual = _train(Classifier, batch, "tarry", 100)
    tarry.set_backend("eager")
    expected = _train(Classifier, batch, "tarry", 100)
    for a, e in zip(actual[:20], expected[:20], strict=True):  # later ones drift apart by rounding alone
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3)
    assert all(torch.isfinite(a).all() for a in actual)


def test_a_gpt_trains_as_in_eager() -> None:
    config = GPTConfig(vocabulary=11, layers=1, width=16, heads=2, context=8)
    batch = torch.randint(11, (2, 8)), torch.randint(11, (2, 8))
    with expect(compiles=2, fallbacks=0, errors=0):
        actual = _train(lambda: GPT(config), batch, "tarry", 4)
    for a, e in zip(actual, _train(lambda: GPT(config), batch, "cpu", 4), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_cache_that_begins_empty(dtype: torch.dtype) -> None:
    def step(device: str) -> Tensor:
        keys = torch.arange(240, dtype=dtype).to(device).view(2, 5, 3, 8).transpose(1, 2) + 1
        cache = torch.cat([torch.tensor([], device=device), keys], -2)  # of another dtype, if keys are integers
        return cache.view(6, 5, 8) * 2

    with expect(compiles=1, fallbacks=0) as seen:
        result = step("tarry").cpu()
    assert not [event for event in seen if event.kind == "interpreted"]
    torch.testing.assert_close(result, step("cpu"))


def test_parameters_are_updated_in_their_buffers() -> None:
    net = nn.Linear(4, 4).to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    addresses = set()
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.ones(2, 4, device="tarry")).sum().backward()
        optimizer.step()
        addresses.add(C.materialise(net.weight.detach()).data_ptr())
    assert len(addresses) == 1


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
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(ids: list[list[int]]) -> None:
        loss = net(torch.tensor(ids, device="tarry")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tarry.wait()

    step([[0, 1], [2, 3]])
    before = {name: value.cpu() for name, value in net.state_dict().items()}
    with pytest.raises(IndexError, match=r"aten::embedding, recorded at .*test_inductor\.py:\d+"):
        step([[0, 9], [1, 2]])
    optimizer.zero_grad()
    for name, value in net.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name


def test_a_scatter_that_is_concatenated_keeps_its_buffer() -> None:
    """Inductor alone gives wrong gradients here; see `_scatters_into_cat`."""
    gradients = []
    for device in ("cpu", "tarry"):
        torch.manual_seed(0)
        program = graph_network()
        model = program.model.to(device)
        batch = [t.to(device) for t in program.batch(0)]
        F.cross_entropy(model(*batch[:-1]), batch[-1]).backward()
        gradients.append([p.grad.cpu() for p in model.parameters()])
    for a, e in zip(*gradients, strict=True):
        torch.testing.assert_close(a, e)


def _window_then_add(a: Tensor) -> list[Tensor]:
    a[1:] = 3.0
    between = a.clone()
    a.add_(1)
    return [a, between]


def _put_then_copy(a: Tensor) -> list[Tensor]:
    between = a.index_put((torch.tensor([1, 2], device=a.device),), torch.tensor([9.0, 8.0], device=a.device))
    a.copy_(between + 1)
    return [a, between]


@pytest.mark.parametrize("program", [_window_then_add, _put_then_copy])
def test_a_value_taken_between_two_writes_is_that_of_its_time(program: Callable[[Tensor], list[Tensor]]) -> None:
    """Inductor alone shows the later write in the earlier value; see `_without_scattered_updates`."""
    expected = program(torch.arange(8.0))
    a = torch.arange(8.0).to("tarry")
    tarry.mark_step()
    for actual, wanted in zip(program(a), expected, strict=True):
        assert torch.equal(actual.cpu(), wanted)


def test_a_check_that_fails_after_a_scatter_leaves_the_input_as_it_was() -> None:
    a, x = torch.arange(4.0).to("tarry"), torch.ones(3).to("tarry")
    tarry.mark_step()
    doubled = a * 2
    a[torch.tensor([1, 2], device="tarry")] = 300.0
    a.add_(x.gather(0, torch.tensor([7], device="tarry")).sum() + a.sum())
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        tarry.mark_step(wait=True)
    assert doubled.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_what_inductor_cannot_compile_runs_on_the_reference_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such template")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", give_up)
    x = torch.ones(3, device="tarry")
    with record() as seen, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert (x.cosh() + 1).shape == (3,)
        for _ in range(2):
            (x.cosh() + 1).cpu()
    assert [str(w.message) for w in said if "no such template" in str(w.message)]
    assert [event for event in seen if event.kind == "interpreted"]


def test_options_reach_inductor_and_the_text_is_its_code() -> None:
    tarry.set_backend(InductorBackend(options={"cpp.simdlen": 1}))
    x = torch.randn(4, 16).to("tarry")
    text = tarry.explain((x.sin() * 0.5).sum(0), stage="compiled")
    assert "def call(self, args)" in text
    assert "cpp_fused" in text
    assert "Vectorized" not in text


def test_recomputed_activations_stay_behind_the_forward_pass() -> None:
    """Inductor would fuse them with what forward reads, and so keep them from forward to backward."""
    torch.manual_seed(0)
    sizes = GPTConfig(vocabulary=20, layers=2, width=16, context=8, recompute=True)
    model = GPT(sizes).to("tarry")
    tokens = torch.randint(20, (2, 8)).to("tarry")
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    with tarry.config.override(run_ahead=False):  # in one piece
        source = tarry.explain(loss, *(grad for grad in grads if grad is not None), stage="compiled")
    body = source[source.rindex("def call(") :]
    attention = [m.start() for m in re.finditer(r"_scaled_dot_product_flash_attention_for_cpu\.default\(", body)]
    loss_at = body.index("log_softmax")
    assert len(attention) == 2 * sizes.layers
    assert sum(at < loss_at for at in attention) == sizes.layers, "recomputed before the loss was there"


def _body(step: Callable[[], list[Tensor]]) -> str:
    source = tarry.explain(*step(), stage="compiled")
    return source[source.rindex("def call(") :]


def test_what_reads_a_buffer_last_writes_into_it_though_a_parameter_is_updated_later() -> None:
    weight = torch.randn(8, 8, device="tarry")
    grad, hidden = torch.randn(4, 8, device="tarry"), torch.randn(4, 8, device="tarry")
    tarry.mark_step()

    def step() -> list[Tensor]:
        inner = torch.ops.aten.gelu_backward(grad @ weight, hidden)  # over what reads the weight
        weight.sub_(inner.t() @ hidden)
        return [weight]

    body = _body(step)
    product = re.search(r"extern_kernels\.mm\(.*out=(\w+)\)", body)
    assert product is not None
    assert re.search(rf"\w+ = {product[1]}; del {product[1]}  # reuse", body)


def test_a_buffer_is_freed_after_its_last_use_whatever_comes_later() -> None:
    x = torch.randn(8, 8, device="tarry")
    tarry.mark_step()
    body = _body(lambda: [x @ x @ x @ x])  # the last product could be given the buffer of the first
    assert "# reuse" not in body
    assert re.search(r"del buf\d", body)


def test_a_convolution_is_given_no_copies_of_its_inputs() -> None:
    x, weight = torch.randn(2, 8, 6, 6, device="tarry"), torch.randn(8, 8, 3, 3, device="tarry", requires_grad=True)
    tarry.mark_step()

    def step() -> list[Tensor]:
        loss = F.conv2d(F.relu(F.conv2d(x, weight, padding=1)), weight, padding=1).sum()
        return [loss, *torch.autograd.grad(loss, weight)]

    layouts = re.findall(r"empty_strided_cpu\(\(2, 8, 6, 6\), (\(.*?\)), torch", _body(step))
    assert set(layouts) <= {"(288, 36, 6, 1)"}


def test_dropout_of_inductors_own_is_compiled_in_a_new_process() -> None:
    """Inductor registers its operator for random numbers when a module of it is imported: the first graph needs it."""
    program = """
        import torch
        import tarry
        from tarry.backends.inductor import InductorBackend

        tarry.set_backend(InductorBackend("cpu", device_random=True), compile="wait")
        x = torch.ones(1000, device="tarry")
        sums = [torch.nn.functional.dropout(x, 0.5).sum().item() for _ in range(4)]
        print(len(set(sums)) > 1, all(800 < s < 1200 for s in sums), tarry.metrics.counters()["compile"] > 0)
    """
    assert run_script(program).split() == ["True", "True", "True"]
