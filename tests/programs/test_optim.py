"""Every optimizer of torch.optim, its foreach and fused forms, schedulers, clipping: trained as on CPU eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import DEVICE, assert_same, dev, expect, step, tarry_only

USES_DEVICE = True

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.05, **k),
    "SGD momentum": lambda p, **k: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, **k),
    "SGD dampening": lambda p, **k: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, maximize=True, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=0.01, **k),
    "Adam amsgrad": lambda p, **k: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=0.01, **k),
    "Adamax": lambda p, **k: torch.optim.Adamax(p, lr=0.01, **k),
    "NAdam": lambda p, **k: torch.optim.NAdam(p, lr=0.01, **k),
    "RAdam": lambda p, **k: torch.optim.RAdam(p, lr=0.01, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, **k),
    "Adadelta": lambda p, **k: torch.optim.Adadelta(p, lr=1.0, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, **k),
    "Rprop": lambda p, **k: torch.optim.Rprop(p, lr=0.01, **k),
    "ASGD": lambda p, **k: torch.optim.ASGD(p, lr=0.05, **k),
}
#: Optimizers of parameters alone, with no foreach form.
SINGLE: dict[str, Make] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3),
}
FUSED = ("SGD", "SGD momentum", "Adam", "Adam amsgrad", "AdamW", "Adagrad")


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)


def _train(
    make: Make, device: str, steps: int = 4, *, each: Callable[..., None] | None = None, **options: Any
) -> nn.Module:
    net = _net().to(device)
    optimizer = make(net.parameters(), **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        return loss

    for i in range(steps):
        x, y = (t.to(device) for t in _batch(i))
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            if each is not None:
                each(net, optimizer)
            optimizer.step()
    return net


@pytest.mark.parametrize("form", ["default", "for-loop", "foreach"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_trains_as_on_cpu(name: str, form: str) -> None:
    options = {"default": {}, "for-loop": {"foreach": False}, "foreach": {"foreach": True}}[form]
    expected = _train(OPTIMIZERS[name], "cpu", **options)
    actual = _train(OPTIMIZERS[name], DEVICE, **options)
    assert_same(actual.state_dict(), expected.state_dict())


@pytest.mark.parametrize("name", list(SINGLE))
def test_optimizers_without_foreach(name: str) -> None:
    assert_same(_train(SINGLE[name], DEVICE).state_dict(), _train(SINGLE[name], "cpu").state_dict())


@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str) -> None:
    expected = _train(OPTIMIZERS[name], "cpu", fused=True)
    actual = _train(OPTIMIZERS[name], DEVICE, fused=True)
    assert_same(actual.state_dict(), expected.state_dict())


def test_capturable_and_tensor_learning_rate() -> None:
    def make(p: Any, **_: Any) -> torch.optim.Optimizer:
        parameters = list(p)
        return torch.optim.Adam(
            parameters, lr=torch.tensor(0.01, device=parameters[0].device), capturable=True, foreach=True
        )

    def reference(p: Any, **_: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(p, lr=0.01)

    if DEVICE == "cpu":
        pytest.skip("capturable is for accelerators")
    assert_same(_train(make, DEVICE).state_dict(), _train(reference, "cpu").state_dict())


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2, cycle_momentum=False),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1 / (1 + e)),
}


def _scheduled(name: str, device: str) -> nn.Module:
    net = _net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    for i in range(5):
        x, y = (t.to(device) for t in _batch(i))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        scheduler.step()
    return net


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_schedulers(name: str) -> None:
    assert_same(_scheduled(name, DEVICE).state_dict(), _scheduled(name, "cpu").state_dict())


def test_reduce_on_plateau_reads_the_loss() -> None:
    net = _net().to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        scheduler.step(torch.ones((), device=DEVICE))
    assert optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize(
    "clip",
    [
        lambda n, o: nn.utils.clip_grad_norm_(n.parameters(), 0.1),
        lambda n, o: nn.utils.clip_grad_norm_(n.parameters(), 0.1, norm_type=float("inf")),
        lambda n, o: nn.utils.clip_grad_norm_(n.parameters(), 0.1, error_if_nonfinite=True),
        lambda n, o: nn.utils.clip_grad_norm_(n.parameters(), 0.1, foreach=True),
        lambda n, o: nn.utils.clip_grad_norm_(n.parameters(), 0.1, foreach=False),
        lambda n, o: nn.utils.clip_grad_value_(n.parameters(), 0.01),
    ],
    ids=["norm", "inf norm", "checked", "foreach", "for-loop", "value"],
)
def test_gradient_clipping(clip: Callable[..., None]) -> None:
    make = OPTIMIZERS["SGD momentum"]
    assert_same(_train(make, DEVICE, each=clip).state_dict(), _train(make, "cpu", each=clip).state_dict())


def test_parameter_groups_frozen_and_unused_parameters() -> None:
    def run(device: str) -> dict[str, Tensor]:
        net = _net()
        net.extra = nn.Parameter(torch.ones(2))  # never gets a gradient
        net[0].weight.requires_grad_(False)
        net = net.to(device)
        groups = [{"params": [net[0].bias, net.extra], "lr": 0.5}, {"params": net[2].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        for i in range(3):
            x, y = (t.to(device) for t in _batch(i))
            optimizer.zero_grad()
            nn.functional.mse_loss(net[:3](x), y).backward()
            optimizer.step()
        return net.state_dict()

    assert_same(run(DEVICE), run("cpu"))


def test_swa_and_ema_averaging() -> None:
    def run(device: str) -> dict[str, Tensor]:
        net = _net().to(device)
        ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for i in range(4):
            x, y = (t.to(device) for t in _batch(i))
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            ema.update_parameters(net)
        return {k: v for k, v in ema.state_dict().items() if k != "n_averaged"}  # the count stays on the host

    assert_same(run(DEVICE), run("cpu"))


def test_two_optimizers_in_one_step() -> None:
    def run(device: str) -> dict[str, Tensor]:
        net = _net().to(device)
        a, b = torch.optim.Adam(net[0].parameters(), lr=0.01), torch.optim.SGD(net[2].parameters(), lr=0.1)
        for i in range(3):
            x, y = (t.to(device) for t in _batch(i))
            loss = nn.functional.mse_loss(net(x), y)
            a.zero_grad(), b.zero_grad()
            loss.backward()
            a.step(), b.step()
        return net.state_dict()

    assert_same(run(DEVICE), run("cpu"))


def _one_step(net: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
    x, y = (dev(t) for t in _batch(i))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@tarry_only
@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_at_most_one_extra_compile_for_fresh_state(name: str) -> None:
    net = _net().to(DEVICE)
    optimizer = OPTIMIZERS[name](net.parameters())
    _one_step(net, optimizer, 0)
    _one_step(net, optimizer, 1)
    with expect(compiles=0, syncs=3, fallbacks=0):
        for i in range(3):
            _one_step(net, optimizer, i + 2)


@tarry_only
def test_changing_numbers_do_not_recompile() -> None:
    net = _net().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.9**e)
    for i in range(2):
        _one_step(net, optimizer, i)
        schedule.step()
    with expect(compiles=0):
        for i in range(6):
            _one_step(net, optimizer, i)
            schedule.step()


@tarry_only
def test_the_end_of_the_optimizers_step_cuts() -> None:
    net = _net().to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(2):
        _one_step(net, optimizer, i)
    with expect(syncs=1, executes=1, compiles=0):
        loss = _one_step(net, optimizer, 2)
    with expect(executes=0):
        loss.item()


@tarry_only
def test_a_kept_loss_does_not_recompile_every_step() -> None:
    net = _net().to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    log = [_one_step(net, optimizer, i) for i in range(3)]
    with expect(compiles=0):
        log += [_one_step(net, optimizer, i) for i in range(4)]
    assert len([value.item() for value in log]) == 7


def test_zero_grad_forms_agree() -> None:
    results = []
    for set_to_none in (True, False):
        net = _net().to(DEVICE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for i in range(3):
            x, y = (dev(t) for t in _batch(i))
            optimizer.zero_grad(set_to_none=set_to_none)
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        results.append({k: v.cpu() for k, v in net.state_dict().items()})
    for key, value in results[0].items():
        torch.testing.assert_close(value, results[1][key])


def test_optimizer_hooks_and_state_are_on_the_device() -> None:
    net = _net().to(DEVICE)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    _one_step(net, optimizer, 0)
    step()
    assert calls == ["pre", "post"]
    state = optimizer.state[net[0].weight]
    assert state["exp_avg"].device.type == DEVICE
    twin = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(twin)
    _one_step(net, optimizer, 1)
