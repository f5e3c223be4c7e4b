"""What a replay depends on: each change is noticed, the call is recorded, and the values are those of eager PyTorch."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tarry
from tests.replay.training import Trainer, batches, mlp, replayed, trainer
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


@contextlib.contextmanager
def recorded(step: Any, calls: int) -> Iterator[None]:
    """Within the block, that many calls are recorded."""
    before = step.recorded
    yield
    assert step.recorded - before == calls, step.explain()


def pair() -> tuple[Trainer, Trainer, Any]:
    """The same training on the CPU and replayed, in the same state."""
    eager, watched = trainer("cpu"), trainer("tarry")
    for x, y in batches(4):
        eager.step(x, y)
    return eager, watched, replayed(watched)


def same_steps(eager: Trainer, watched: Trainer, step: Any, count: int = 4, **sizes: int) -> None:
    for x, y in batches(count, **sizes):
        torch.testing.assert_close(step(x.to("tarry"), y.to("tarry")).cpu(), eager.step(x, y), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(watched.state(), eager.state(), rtol=1e-4, atol=1e-5)


# ---- arguments


def test_batch_sizes_take_turns() -> None:
    eager, watched, step = pair()
    with recorded(step, 2):
        same_steps(eager, watched, step, count=4, size=7)
    with recorded(step, 0):
        same_steps(eager, watched, step, count=2, size=4)
        same_steps(eager, watched, step, count=2, size=7)
    assert step.explain().count("replayed for") == 2


def test_no_more_than_eight_replays_are_kept() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    step = tarry.compile(double, verify=0)
    for size in range(1, 12):
        for _ in range(3):
            assert step(torch.ones(size, device="tarry")).sum().item() == 2 * size
    assert step.explain().count("replayed for") == 8
    assert step.replays == 11


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.double(),
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x])[4:],
        lambda x: x.clone().requires_grad_(),
        lambda x: x.cpu(),
    ],
    ids=["dtype", "strides", "part of another", "requires_grad", "host"],
)
def test_arguments_of_another_type(other: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        return (x.to("tarry") * 2).sum().detach()

    step = tarry.compile(function, verify=0)
    x = torch.randn(4, 3).to("tarry")
    for _ in range(3):
        step(x)
    assert step.replays == 1
    with recorded(step, 1):
        torch.testing.assert_close(step(other(x)).cpu().float(), (x * 2).sum().cpu())


def test_arguments_that_share_memory() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    step = tarry.compile(function, verify=0)
    for _ in range(3):
        step(torch.ones(2, device="tarry"), torch.ones(2, device="tarry"))
    assert step.replays == 1
    with recorded(step, 1):
        x = torch.ones(2, device="tarry")
        assert step(x, x).tolist() == [4.0, 4.0]


def test_an_argument_that_is_a_parameter() -> None:
    scale = torch.ones(2, device="tarry")

    def function(x: Tensor) -> Tensor:
        x.add_(1)
        return x * scale

    step = tarry.compile(function, verify=0)
    for _ in range(3):
        step(torch.ones(2, device="tarry"))
    assert step.replays == 1
    with recorded(step, 1):
        assert step(scale).tolist() == [4.0, 4.0]


def test_plain_arguments_are_compared_by_value() -> None:
    def function(x: Tensor, factor: float, options: dict[str, Any], *, flip: bool = False) -> Tensor:
        return x * factor * options["scale"] * (-1 if flip else 1)

    step = tarry.compile(function, verify=0)
    x = torch.ones(1, device="tarry")
    for _ in range(4):
        assert step(x, 2.0, {"scale": 3.0}, flip=False).item() == 6
    assert step.replays == 2
    with recorded(step, 1):
        assert step(x, 2.0, {"scale": 3.0}, flip=True).item() == -6
    with recorded(step, 1):
        assert step(x, 5.0, {"scale": 3.0}, flip=False).item() == 15
    with recorded(step, 1):
        assert step(x, 2.0, {"scale": 4.0}, flip=False).item() == 8
    with recorded(step, 1):
        assert step(x, 2.0, {"other": 0, "scale": 3.0}, flip=False).item() == 6


def test_written_arguments_are_written() -> None:
    def function(x: Tensor) -> None:
        x.mul_(2)

    step = tarry.compile(function, verify=0)
    for _ in range(5):
        x = torch.ones(3, device="tarry")
        version = x._version
        assert step(x) is None
        assert x.tolist() == [2.0, 2.0, 2.0]
        assert x._version > version
    assert step.replays == 3


def test_gradients_of_arguments() -> None:
    def function(x: Tensor) -> Tensor:
        loss = x.pow(2).sum()
        loss.backward()
        return loss

    step = tarry.compile(function, verify=0)
    for k in range(6):
        x = (torch.ones(2, device="tarry") * k).requires_grad_()
        step(x)
        assert x.grad is not None
        assert x.grad.tolist() == [2.0 * k, 2.0 * k]
    assert step.replays == 4
    for _ in range(3):  # adds to what is there
        step(x)
    assert x.grad.tolist() == [40.0, 40.0]
    assert step.replays == 4
    assert "uses the .grad that an argument had" in step.explain()


def test_settings_of_the_recorder() -> None:
    step = tarry.compile(lambda x: x * 2, verify=0)
    for _ in range(3):
        step(torch.ones(2, device="tarry"))
    assert step.replays == 1
    with recorded(step, 1), tarry.config.override(force_fallback={"aten::mul.Tensor"}):
        step(torch.ones(2, device="tarry"))


# ---- models and optimizers


def _eval(t: Trainer) -> None:
    t.model.eval()


def _replace(t: Trainer) -> None:
    t.model[2].bias = nn.Parameter(torch.ones_like(t.model[2].bias))  # not known to the optimizer


def _replace_data(t: Trainer) -> None:
    t.model[0].weight.data = t.model[0].weight.data * 2


def _freeze(t: Trainer) -> None:
    t.model[0].weight.requires_grad_(False)


def _learning_rate(t: Trainer) -> None:
    t.optimizer.param_groups[0]["lr"] = 0.05


def _momentum_state(t: Trainer) -> None:
    for state in t.optimizer.state.values():
        state["momentum_buffer"] = torch.ones_like(state["momentum_buffer"])


def _load_optimizer(t: Trainer) -> None:
    state = t.optimizer.state_dict()
    state["param_groups"][0]["momentum"] = 0.5
    t.optimizer.load_state_dict(state)


def _add_group(t: Trainer) -> None:
    extra = nn.Parameter(torch.zeros(2, device=t.model[0].weight.device))
    t.optimizer.add_param_group({"params": [extra]})


def _module_hook(t: Trainer) -> None:
    t.model[0].register_forward_hook(lambda module, args, output: output * 2)


def _tensor_hook(t: Trainer) -> None:
    t.model[0].weight.register_hook(lambda gradient: gradient * 2)


def _optimizer_hook(t: Trainer) -> None:
    t.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: [p.grad.mul_(2) for p in optimizer.param_groups[0]["params"]] and None
    )


def _layer(t: Trainer) -> None:
    t.model[1] = nn.Tanh()


def _attribute(t: Trainer) -> None:
    t.model[1].inplace = True


@pytest.mark.parametrize(
    "change",
    [
        _replace, _replace_data, _freeze, _learning_rate, _momentum_state, _load_optimizer, _add_group, _module_hook,
        _tensor_hook, _optimizer_hook, _layer, _attribute,
    ],
)  # fmt: skip
def test_a_change_of_the_model_or_the_optimizer(change: Callable[[Trainer], None]) -> None:
    eager, watched, step = pair()
    change(eager)
    change(watched)
    before = step.recorded
    same_steps(eager, watched, step, count=6)
    assert 1 <= step.recorded - before <= 3, step.explain()
    assert tarry.metrics.counters()["replay_guard_failed"] >= 1


def test_a_changed_learning_rate_costs_one_recorded_call() -> None:
    eager, watched, step = pair()
    for t in (eager, watched):
        t.optimizer.param_groups[0]["lr"] = 0.05
    with recorded(step, 1):
        same_steps(eager, watched, step, count=4)
    assert "optimizer.param_groups[0]['lr'] was 0.1 and is 0.05 now" in step.explain()


def test_training_and_evaluation_take_turns() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to("tarry")
    eager = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    eager.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    step = tarry.compile(predict, verify=0)
    for k in range(12):
        for module in (model, eager):
            module.train(k % 2 == 0)
        x = torch.randn(5, 3)
        torch.testing.assert_close(step(x.to("tarry")).cpu(), eager(x).detach(), rtol=1e-4, atol=1e-5)
    assert step.replays >= 6, step.explain()


def test_values_written_from_outside_are_used() -> None:
    eager, watched, step = pair()
    for t in (eager, watched):
        with torch.no_grad():
            for p in t.model.parameters():
                p.mul_(0.5)
    with recorded(step, 0):
        same_steps(eager, watched, step)
    state = {k: torch.ones_like(v, device="cpu") * 0.1 for k, v in eager.model.state_dict().items()}
    eager.model.load_state_dict(state)
    watched.model.load_state_dict(state)
    with recorded(step, 0):
        same_steps(eager, watched, step)


def test_a_schedule_by_a_tensor_is_replayed() -> None:
    """A learning rate that is a tensor on the device is data: changing it costs nothing."""

    def make(device: str) -> tuple[Trainer, Tensor]:
        rate = torch.tensor(0.1, device=device)
        settings: dict[str, Any] = {"capturable": True} if device == "tarry" else {"foreach": False}
        return trainer(device, mlp, lambda model: torch.optim.AdamW(model.parameters(), lr=rate, **settings)), rate

    (eager, eager_rate), (watched, rate) = make("cpu"), make("tarry")
    step = tarry.compile(watched.step, verify=0)
    for k, (x, y) in enumerate(batches(10)):
        eager_rate.fill_(0.1 / (k + 1))
        rate.fill_(0.1 / (k + 1))
        torch.testing.assert_close(step(x.to("tarry"), y.to("tarry")).cpu(), eager.step(x, y), rtol=1e-3, atol=1e-4)
    assert step.replays >= 6, step.explain()
    torch.testing.assert_close(watched.state(), eager.state(), rtol=1e-3, atol=1e-4)


def test_a_host_tensor_that_changes_is_moved_anew() -> None:
    scale = torch.tensor(2.0)
    step = tarry.compile(lambda x: x * scale, verify=0)
    for _ in range(4):
        assert step(torch.ones((), device="tarry")).item() == 2
    assert step.replays == 2
    scale.fill_(3.0)
    assert step(torch.ones((), device="tarry")).item() == 3


# ---- gradients and results that are held elsewhere


def test_gradients_and_losses_that_are_held_keep_their_values() -> None:
    eager, watched, step = pair()
    held: list[tuple[Tensor, Tensor]] = []
    for x, y in batches(5):
        loss, expected = step(x.to("tarry"), y.to("tarry")), eager.step(x, y)
        held.append((loss, expected))
        held.append((watched.model[0].weight.grad, eager.model[0].weight.grad))
    for mine, theirs in held:
        torch.testing.assert_close(mine.cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_gradients_that_were_cleared_or_set_outside() -> None:
    eager, watched, step = pair()
    for t in (eager, watched):
        t.optimizer.zero_grad()
    same_steps(eager, watched, step)
    for t in (eager, watched):
        t.model[0].weight.grad = torch.ones_like(t.model[0].weight)
    same_steps(eager, watched, step)


def test_gradients_that_add_up_follow_the_tensor_that_is_there() -> None:
    def make(device: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).to(device)

        def step(x: Tensor) -> Tensor:
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss.detach()

        return model, step

    (eager, plain), (model, recorded_step) = make("cpu"), make("tarry")
    step = tarry.compile(recorded_step, verify=0)
    for k in range(12):
        if k == 6:  # another tensor, of the same shape
            for m in (eager, model):
                m.weight.grad = torch.full_like(m.weight, 5.0)
        x = torch.randn(4, 3)
        torch.testing.assert_close(step(x.to("tarry")).cpu(), plain(x))
        torch.testing.assert_close(model.weight.grad.cpu(), eager.weight.grad)
    assert step.replays >= 8, step.explain()


def test_a_graph_from_before_a_replay_notices_the_update() -> None:
    _, watched, step = pair()
    x, y = batches(1, device="tarry")[0]
    loss = F.cross_entropy(watched.model(x), y)
    with recorded(step, 0):
        step(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- surroundings

SCALE = 2.0
SETTINGS = types.SimpleNamespace(scale=2.0, unused=0)


def test_globals_closures_attributes_and_items() -> None:
    global SCALE
    factor, factors = 2.0, [2.0]

    def helper(x: Tensor) -> Tensor:
        return x * SCALE

    def function(x: Tensor) -> Tensor:
        return helper(x) * factor * factors[0] * SETTINGS.scale

    step = tarry.compile(function, verify=0)
    x = torch.ones((), device="tarry")

    def expect(value: float, calls: int) -> None:
        with recorded(step, calls):
            assert step(x).item() == value

    for _ in range(2):
        expect(16.0, 1)
    expect(16.0, 0)
    factor = 3.0
    for calls in (1, 1, 0):
        expect(24.0, calls)
    factors[0] = 1.0
    for calls in (1, 1, 0):
        expect(12.0, calls)
    SETTINGS.unused += 1  # the code does not read it
    expect(12.0, 0)
    try:
        SETTINGS.scale = 1.0
        expect(6.0, 1)
        SCALE = 1.0
        expect(3.0, 1)
    finally:
        SETTINGS.scale = SCALE = 2.0
    factors.append(1.0)
    expect(12.0, 1)


class Dispatching(TorchDispatchMode):
    """Sees every operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Calling(TorchFunctionMode):
    """Sees every function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "surroundings",
    [
        lambda: torch.no_grad(),
        lambda: torch.inference_mode(),
        lambda: torch.autocast("tarry", torch.bfloat16),
        lambda: Dispatching(),
        lambda: Calling(),
    ],
    ids=["no_grad", "inference_mode", "autocast", "dispatch mode", "function mode"],
)
def test_what_is_switched_on(surroundings: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    weight = torch.randn(3, 3, device="tarry", requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return (x @ weight).detach()

    step = tarry.compile(function, verify=0)
    x = torch.randn(2, 3, device="tarry")
    for _ in range(4):
        step(x)
    assert step.replays == 2
    with recorded(step, 1), surroundings():
        result = step(x)
    with surroundings():
        expected = function(x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result.cpu(), expected.cpu())
    with recorded(step, 0):
        step(x)


def test_a_default_device_is_no_hindrance() -> None:
    step = tarry.compile(lambda x: x + torch.ones(2), verify=0)
    x = torch.ones(2, device="tarry")
    with torch.device("tarry"):
        for _ in range(4):
            assert step(x).tolist() == [2.0, 2.0]
    assert step.replays == 2
    with recorded(step, 1), torch.device("cpu"), pytest.raises(RuntimeError, match="same device"):
        step(x)


def test_the_default_dtype_and_deterministic_algorithms() -> None:
    step = tarry.compile(lambda x: x + torch.ones(2, device="tarry"), verify=0)
    x = torch.ones(2, device="tarry")
    for _ in range(3):
        step(x)
    try:
        torch.set_default_dtype(torch.float64)
        with recorded(step, 1):
            assert step(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with recorded(step, 0):
        step(x)
    try:
        torch.use_deterministic_algorithms(True)
        with recorded(step, 1):
            step(x)
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_backend() -> None:
    eager, watched, step = pair()
    try:
        tarry.set_backend("torchscript")
        with recorded(step, 2):
            same_steps(eager, watched, step)
    finally:
        tarry.set_backend("eager")


def test_a_custom_operator_that_is_declared_anew() -> None:
    def declare(factor: float) -> Any:
        @tarry.custom_op("tests_replay::scale")
        def scale(x: Tensor) -> Tensor: ...

        scale.impl(["cpu"])(lambda x: x * factor)
        scale.impl_abstract()(torch.empty_like)
        return scale

    scale = declare(2.0)
    step = tarry.compile(lambda x: torch.ops.tests_replay.scale(x), verify=0)
    try:
        for _ in range(4):
            assert step(torch.ones(1, device="tarry")).item() == 2
        assert step.replays == 2
        scale = declare(3.0)
        assert step(torch.ones(1, device="tarry")).item() == 3
    finally:
        scale.remove()


class Named:
    """A class that is named for its attributes."""

    scale = 2.0


def test_a_class_that_is_named() -> None:
    step = tarry.compile(lambda x: (x * Named.scale).sum(), verify=0)
    x = torch.ones(4, device="tarry")
    assert [step(x).item() for _ in range(6)] == [8.0] * 6
    try:
        Named.scale = 3.0
        assert step(x).item() == 12.0
    finally:
        Named.scale = 2.0


def test_a_hook_in_the_place_of_another() -> None:
    layer = torch.nn.Linear(2, 1).to("tarry")
    handle = layer.register_forward_hook(lambda module, given, out: out * 0 + 1)
    step = tarry.compile(lambda x: layer(x).detach().sum(), verify=0)
    x = torch.ones(4, 2, device="tarry")
    assert [step(x).item() for _ in range(6)] == [4.0] * 6
    assert step.replays
    handle.remove()
    layer.register_forward_hook(lambda module, given, out: out * 0 + 2)
    assert step(x).item() == 8.0
