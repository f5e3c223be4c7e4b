"""Plain steps of SGD, Adam and AdamW record the calls of PyTorch's own code, and everything else is left to it."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tarry
from tarry.device import fast_step
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

PLAIN: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "foreach": True}),
    "Adam": (torch.optim.Adam, {}),
    "Adam decay": (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.5, 0.7), "eps": 1e-3}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW without decay": (torch.optim.AdamW, {"weight_decay": 0}),
}
OTHERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "fused": (torch.optim.AdamW, {"fused": True}),
    "one by one": (torch.optim.Adam, {"foreach": False}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "maximize": (torch.optim.SGD, {"maximize": True}),
    "capturable": (torch.optim.Adam, {"capturable": True}),
    "another class": (torch.optim.NAdam, {}),
    "a subclass": (type("Mine", (torch.optim.Adam,), {}), {}),
}


@contextmanager
def torchs_own() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_step, "_PREPARE", {})
        yield


@contextmanager
def counted() -> Iterator[list[bool]]:
    """Notes of each step whether it was a fast one."""
    seen: list[bool] = []
    of = fast_step.of

    def noted(*args: Any) -> Any:
        found = of(*args)
        seen.append(found is not None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_step, "of", noted)
        yield seen


def model(device: str = "tarry") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 1)).to(device)


def backward(trained: nn.Module, scale: float = 1.0) -> None:
    trained.zero_grad()
    weight = next(trained.parameters())
    (trained(torch.linspace(-1, 2, 6).reshape(2, 3).to(weight)).square().sum() * scale).backward()


def steps(
    make: type[torch.optim.Optimizer], options: dict[str, Any], count: int = 4
) -> tuple[list[torch.Tensor], list[str], dict[str, Any]]:
    """Weights, the graph of each step, and the optimizer's state."""
    trained = model()
    parameters = list(trained.parameters())
    optimizer = make([{"params": parameters[:2], "lr": 0.2}, {"params": parameters[2:]}], lr=0.1, **options)
    graphs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tarry.config, "cut_after_optimizer", False)
        for k in range(count):
            backward(trained, 1.0 + k)
            optimizer.step()
            graphs.append(tarry.explain(*parameters))
            tarry.mark_step(wait=True)
            optimizer.param_groups[0]["lr"] *= 0.9
    return [p.detach().cpu() for p in parameters], graphs, copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("name", PLAIN)
def test_it_records_what_torchs_own_code_records(name: str) -> None:
    with counted() as fast:
        weights, graphs, state = steps(*PLAIN[name])
    with torchs_own():
        expected, texts, state_of_torchs = steps(*PLAIN[name])
    assert any(fast)
    without_lines = [[line.split("#")[0] for line in text.splitlines()] for text in graphs]
    assert without_lines == [[line.split("#")[0] for line in text.splitlines()] for text in texts]
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    torch.testing.assert_close(state, state_of_torchs, rtol=0, atol=0)


def test_only_the_first_step_of_a_stateful_optimizer_is_torchs() -> None:
    with counted() as fast:
        steps(*PLAIN["AdamW"])
    assert fast == [False, True, True, True]


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_plain_is_left_to_torch(name: str) -> None:
    with counted() as fast:
        weights, _, _ = steps(*OTHERS[name])
    with torchs_own():
        expected, _, _ = steps(*OTHERS[name])
    assert not any(fast)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def tensor_rate(optimizer: torch.optim.Optimizer, trained: nn.Module) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.1)


def state_of_another_dtype(optimizer: torch.optim.Optimizer, trained: nn.Module) -> None:
    trained.to(torch.bfloat16)


def count_as_a_number(optimizer: torch.optim.Optimizer, trained: nn.Module) -> None:
    for entry in optimizer.state.values():
        entry["step"] = entry["step"].to("tarry")


def cleared_state(optimizer: torch.optim.Optimizer, trained: nn.Module) -> None:
    optimizer.state.clear()


def hook(optimizer: torch.optim.Optimizer, trained: nn.Module) -> None:
    optimizer.register_step_post_hook(lambda *args: None)


def swapped_entries(optimizer: torch.optim.Optimizer, trained: nn.Module) -> None:
    entries = [(key, optimizer.state.pop(key)) for key in list(optimizer.state)]
    optimizer.state.update(reversed(entries))


def missing_gradient(optimizer: torch.optim.Optimizer, trained: nn.Module) -> None:
    trained[0].bias.requires_grad_(False)  # type: ignore[index, union-attr, operator]


def changed_count(optimizer: torch.optim.Optimizer, trained: nn.Module) -> None:
    next(iter(optimizer.state.values()))["step"].data.fill_(100)


def moved_weights(optimizer: torch.optim.Optimizer, trained: nn.Module) -> None:
    for p in trained.parameters():
        p.data = p.data.clone()


CHANGES: list[Callable[[torch.optim.Optimizer, nn.Module], None]] = [
    tensor_rate, state_of_another_dtype, count_as_a_number, cleared_state, hook, swapped_entries, missing_gradient,
    changed_count, moved_weights,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_steps_is_seen(change: Callable[[torch.optim.Optimizer, nn.Module], None]) -> None:
    def run() -> Any:
        trained = model()
        optimizer = torch.optim.Adam(trained.parameters(), lr=0.1)
        for k in range(5):
            backward(trained)
            if k == 3:
                change(optimizer, trained)
                backward(trained)
            try:
                optimizer.step()
            except RuntimeError as error:
                return type(error), str(error)
        return [p.detach().cpu() for p in trained.parameters()]

    made = run()
    with torchs_own():
        expected = run()
    if isinstance(expected, tuple):
        assert made == expected
    else:
        torch.testing.assert_close(made, expected, rtol=0, atol=0)


def test_a_closure_and_a_profiler_see_torchs_code() -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    backward(trained)
    with counted() as fast:
        assert optimizer.step(lambda: 3.5) == 3.5
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.step()
    assert not fast
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_a_failed_step_is_not_counted(kind: str) -> None:
    trained, table = model(), nn.Embedding(4, 3, device="tarry")
    optimizer = getattr(torch.optim, kind)([*trained.parameters(), *table.parameters()], lr=0.1)

    def step(index: int) -> None:
        optimizer.zero_grad()
        trained(table(torch.tensor([index]).to("tarry"))).sum().backward()
        optimizer.step()

    step(1)
    step(2)
    before = copy.deepcopy(optimizer.state_dict())
    with counted() as fast, pytest.raises(IndexError):
        step(7)
    assert fast == [True]
    optimizer.zero_grad()
    after = optimizer.state_dict()
    assert {int(entry["step"]) for entry in after["state"].values()} == {2}
    torch.testing.assert_close(after, before)


def test_schedulers_and_pickled_optimizers_take_fast_steps() -> None:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with counted() as fast:
        for _ in range(3):
            backward(trained)
            optimizer.step()
            schedule.step()
    assert fast == [False, True, True]
    other = copy.deepcopy(optimizer)
    other.step()
    assert {int(entry["step"]) for entry in other.state.values()} <= {3, 4}


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW"])
def test_a_step_that_is_not_settled_holds_no_gradients(name: str) -> None:
    """A held gradient would keep its memory, and the next step from running ahead on a GPU."""
    make, options = PLAIN[name]
    trained = model()
    optimizer = make(trained.parameters(), lr=0.1, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tarry.config, "cut_after_optimizer", False)
        for _ in range(3):
            backward(trained)
            optimizer.step()
        gradients = [weakref.ref(p.grad) for p in trained.parameters() if p.grad is not None]
        optimizer.zero_grad()
    assert gradients
    assert all(gradient() is None for gradient in gradients)


def as_on_torchs_path(run: Callable[[], Any]) -> None:
    made = run()
    with torchs_own():
        expected = run()
    torch.testing.assert_close(made, expected, rtol=0, atol=0)


NOT_IN_LISTS: list[dict[str, Any]] = [{"fused": False}, {"foreach": 0}, {"foreach": False}]


@pytest.mark.parametrize("options", NOT_IN_LISTS, ids=str)
def test_gradients_stay_where_torchs_code_takes_tensors_one_by_one(options: dict[str, Any]) -> None:
    """Nesterov's form for lists adds to the gradients in place."""

    def run() -> Any:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9, nesterov=True, **options)
        for _ in range(3):
            backward(trained)
            optimizer.step()
        return [p.grad.cpu() for p in trained.parameters() if p.grad is not None]

    as_on_torchs_path(run)


def test_a_group_on_the_cpu_is_left_to_torch() -> None:
    def run() -> Any:
        parameters = [nn.Parameter(torch.ones(3, device=where)) for where in ("tarry", "cpu")]
        groups = [{"params": [p]} for p in parameters]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.ones_like(p)
            optimizer.step()
        return [p.detach().cpu() for p in parameters], [p.grad.cpu() for p in parameters if p.grad is not None]

    as_on_torchs_path(run)


def one_count(entries: list[dict[str, Any]]) -> None:
    count = torch.tensor(2.0)
    for entry in entries:
        entry["step"] = count


def one_memory(entries: list[dict[str, Any]]) -> None:
    for entry, count in zip(entries, torch.tensor([2.0]).expand(len(entries)), strict=True):
        entry["step"] = count


def no_longer_exact(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        entry["step"].fill_(2.0**24)


def a_number(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        entry["step"] = 2.0


def of_inference(entries: list[dict[str, Any]]) -> None:
    with torch.inference_mode():
        one_memory(entries)


COUNTS = [one_count, one_memory, no_longer_exact, a_number, of_inference]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("change", COUNTS, ids=lambda change: change.__name__)
def test_counts_advance_as_in_torchs_code(change: Callable[[list[dict[str, Any]]], None], groups: int) -> None:
    def run() -> Any:
        trained = model()
        parameters = list(trained.parameters())
        split = [{"params": parameters[k::groups]} for k in range(groups)]
        optimizer = torch.optim.Adam(split, lr=0.1, betas=(0.9, 1 - 2**-24))
        failed = []
        for k in range(5):
            backward(trained)
            if k == 2:
                change(list(optimizer.state.values()))
            try:
                optimizer.step()
            except RuntimeError as error:
                failed.append(len(str(error)))
        counts = [float(entry["step"]) for entry in optimizer.state.values()]
        return [p.detach().cpu() for p in parameters], counts, failed

    as_on_torchs_path(run)


def test_a_parameter_given_twice_counts_twice() -> None:
    def run() -> Any:
        weight = nn.Parameter(torch.ones(3, device="tarry"))
        with pytest.warns(UserWarning, match="duplicate"):
            optimizer = torch.optim.Adam([weight, weight], lr=0.1)
        for k in range(4):
            weight.grad = torch.full_like(weight, k + 1.0)
            optimizer.step()
        return weight.detach().cpu(), optimizer.state[weight]["step"].clone()

    as_on_torchs_path(run)


@pytest.mark.parametrize("option", ["maximize", "fused", "amsgrad", "nesterov", "lr", "foreach", "differentiable"])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_missing_option_raises_as_in_torchs_code(kind: str, option: str) -> None:
    def run() -> Any:
        trained = model()
        optimizer = getattr(torch.optim, kind)(trained.parameters(), lr=0.1)
        for k in range(3):
            backward(trained)
            if k == 2:
                optimizer.param_groups[0].pop(option, None)
            try:
                optimizer.step()
            except KeyError as error:
                return str(error) == repr(option)
        return [p.detach().cpu() for p in trained.parameters()]

    as_on_torchs_path(run)


def on_the_instance(patch: pytest.MonkeyPatch, optimizer: Any, replaced: Callable[..., Any]) -> None:
    patch.setattr(optimizer, "_init_group", replaced(optimizer._init_group))


def on_the_class(patch: pytest.MonkeyPatch, optimizer: Any, replaced: Callable[..., Any]) -> None:
    patch.setattr(type(optimizer), "_init_group", replaced(type(optimizer)._init_group))


def the_function(patch: pytest.MonkeyPatch, optimizer: Any, replaced: Callable[..., Any]) -> None:
    name = "sgd" if isinstance(optimizer, torch.optim.SGD) else "adam"
    module = sys.modules[f"torch.optim.{name}"]
    patch.setattr(module, name, replaced(getattr(module, name)))


def the_step(patch: pytest.MonkeyPatch, optimizer: Any, replaced: Callable[..., Any]) -> None:
    owner = next(class_ for class_ in type(optimizer).__mro__ if "step" in vars(class_))
    assert owner is not torch.optim.AdamW  # which inherits Adam's: who replaces that one replaces both
    patch.setattr(owner, "step", replaced(owner.step))


@pytest.mark.parametrize("replace", [on_the_instance, on_the_class, the_function, the_step], ids=lambda r: r.__name__)
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_what_somebody_has_replaced_is_called(kind: str, replace: Callable[..., None]) -> None:
    trained = model()
    optimizer = getattr(torch.optim, kind)(trained.parameters(), lr=0.1)
    called = []

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def mine(*args: Any, **kwargs: Any) -> Any:
            called.append(replace)
            return original(*args, **kwargs)

        return mine

    for k in range(4):
        backward(trained)
        with pytest.MonkeyPatch.context() as patch:
            if k == 2:
                replace(patch, optimizer, replaced)
            optimizer.step()
    assert len(called) == 1


@pytest.mark.parametrize("where", ["cpu", "tarry"])
def test_hooks_run_once_around_a_step_that_calls_the_one_of_its_base(where: str) -> None:
    class Mine(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    weight, called = nn.Parameter(torch.ones(2, device=where)), []
    optimizer = Mine([weight], lr=0.1)
    optimizer.register_step_pre_hook(lambda *args: called.append("before"))
    optimizer.register_step_post_hook(lambda *args: called.append("after"))
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert called == ["before", "after"] * 2


class Seen(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class SeenBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


MODES = [(Seen, False), (SeenBelow, False), (lambda: torch.device("cpu"), True)]


@pytest.mark.parametrize(("mode", "is_fast"), MODES, ids=["functions", "dispatch", "default device"])
def test_modes_see_torchs_code(mode: Callable[[], Any], is_fast: bool) -> None:
    trained = model()
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.1)
    backward(trained)
    optimizer.step()
    with counted() as fast, mode():
        optimizer.step()
    assert fast == [is_fast]


@pytest.mark.parametrize("name", PLAIN)
def test_backward_finds_weights_that_a_step_has_changed(name: str) -> None:
    make, options = PLAIN[name]
    trained = model()
    optimizer = make(trained.parameters(), lr=0.1, **options)
    for _ in range(2):
        loss = trained(torch.ones(2, 3, device="tarry")).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
