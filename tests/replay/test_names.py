"""What code depends on without saying so: methods that are called implicitly, names that are strings, code that is
replaced, objects of installed packages."""

from __future__ import annotations

import contextvars
import operator
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import tarry
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

SCALE = 2.0
FACTOR = operator.attrgetter("factor")
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=2.0)


class Config:
    scale = 2.0

    def __init__(self) -> None:
        self.factor = 2.0
        self.name = "factor"

    def method(self, x: Tensor) -> Tensor:
        return x * 2.0

    def __mul__(self, x: Tensor) -> Tensor:
        return x * self.factor

    def __float__(self) -> float:
        return self.factor


class Other(Config):
    def method(self, x: Tensor) -> Tensor:
        return x * 5.0


class Made:
    """Reads a global when it is made."""

    def __init__(self) -> None:
        self.kept = SCALE


class Scaling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0


def _set_scale(value: float) -> None:
    global SCALE
    SCALE = value


def _import_inside(x: Tensor) -> Tensor:
    import tarry_test_settings  # type: ignore[import-not-found]

    result: Tensor = x * tarry_test_settings.scale
    return result


def _case(make: Callable[[], Any], function: Callable[[Any, Tensor], Tensor], change: Callable[[Any], Any]) -> Any:
    return make, function, change


def _parameter() -> Any:
    parameter: Any = nn.Parameter(torch.ones(3, device="tarry"))
    parameter.scale = 2.0
    return parameter


def _scheduler() -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch < 1 else 2.5)


CASES = {
    "getattr": _case(Config, lambda c, x: x * getattr(c, "factor"), lambda c: setattr(c, "factor", 5.0)),  # noqa: B009
    "a name that is data": _case(Config, lambda c, x: x * getattr(c, c.name), lambda c: setattr(c, "factor", 5.0)),
    "a name that is made": _case(
        Config, lambda c, x: x * getattr(c, f"{c.name[:3]}tor"), lambda c: setattr(c, "factor", 5.0)
    ),
    "__dict__": _case(Config, lambda c, x: x * c.__dict__["factor"], lambda c: setattr(c, "factor", 5.0)),
    "not there yet": _case(
        Config, lambda c, x: x * (c.later if hasattr(c, "later") else 2.0), lambda c: setattr(c, "later", 5.0)
    ),
    "attrgetter": _case(Config, lambda c, x: x * FACTOR(c), lambda c: setattr(c, "factor", 5.0)),
    "globals()": _case(Config, lambda c, x: x * globals()["SCALE"], lambda c: _set_scale(5.0)),
    "operator": _case(Config, lambda c, x: c * x, lambda c: setattr(c, "factor", 5.0)),
    "conversion": _case(Config, lambda c, x: x * float(c), lambda c: setattr(c, "factor", 5.0)),
    "making": _case(Config, lambda c, x: x * Made().kept, lambda c: _set_scale(5.0)),
    "method of an instance": _case(
        Config, lambda c, x: c.method(x), lambda c: setattr(c, "method", lambda x: x * 5.0)
    ),
    "another class": _case(Config, lambda c, x: c.method(x), lambda c: setattr(c, "__class__", Other)),
    "forward of a module": _case(Scaling, lambda c, x: c(x), lambda c: setattr(c, "forward", lambda x: x * 5.0)),
    "import inside": _case(
        Config, lambda c, x: _import_inside(x), lambda c: setattr(sys.modules["tarry_test_settings"], "scale", 5.0)
    ),
    "environment": _case(
        Config,
        lambda c, x: x * float(os.environ.get("TARRY_TEST_SCALE", "2")),
        lambda c: os.environ.update(TARRY_TEST_SCALE="5"),
    ),
    "context variable": _case(Config, lambda c, x: x * VARIABLE.get(), lambda c: VARIABLE.set(5.0)),
    "weak reference": _case(
        lambda: (kept := Config(), weakref.ref(kept)),
        lambda c, x: x * c[1]().factor,
        lambda c: setattr(c[0], "factor", 5.0),
    ),
    "tensor's attribute": _case(_parameter, lambda c, x: x * c.scale, lambda c: setattr(c, "scale", 5.0)),
    "installed package": _case(_scheduler, lambda c, x: x * c.get_last_lr()[0], lambda c: c.step()),
    "dictionary's values": _case(
        lambda: (d := {"a": 2.0}, d.values()), lambda c, x: x * next(iter(c[1])), lambda c: c[0].update(a=5.0)
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", CASES)
def test_changes_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = types.ModuleType("tarry_test_settings")
    settings.scale = 2.0
    monkeypatch.setitem(sys.modules, "tarry_test_settings", settings)
    monkeypatch.setenv("TARRY_TEST_SCALE", "2")
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
    token = VARIABLE.set(2.0)
    make, function, change = CASES[name]
    config = make()
    step = tarry.compile(lambda x: function(config, x).detach())
    x = torch.ones(3, device="tarry")
    assert [step(x).tolist() for _ in range(5)] == [[2.0] * 3] * 5
    assert step.replays, step.explain()
    change(config)
    assert [step(x).tolist() for _ in range(4)] == [[5.0] * 3] * 4
    VARIABLE.reset(token)


def test_a_method_of_a_class_that_is_replaced() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2.0

    class Heir(Model):
        pass

    model, heir = Model(), Heir()
    step = tarry.compile(lambda x: model(x) + heir(x))
    x = torch.ones(3, device="tarry")
    assert [step(x).tolist() for _ in range(4)] == [[4.0] * 3] * 4
    assert step.replays
    Heir.forward = lambda self, x: x * 5.0  # type: ignore[method-assign]
    assert [step(x).tolist() for _ in range(4)] == [[7.0] * 3] * 4
    Model.forward = lambda self, x: x * 3.0  # type: ignore[method-assign]
    assert [step(x).tolist() for _ in range(4)] == [[8.0] * 3] * 4


class Scaled(torch.optim.Optimizer):
    """An optimizer with a setting of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=self.scale)


def test_a_setting_of_an_optimizer() -> None:
    weight = nn.Parameter(torch.zeros(1, device="tarry"))
    optimizer = Scaled([weight])

    @tarry.compile
    def step() -> None:
        optimizer.zero_grad()
        (weight * 2.0).sum().backward()
        optimizer.step()

    for _ in range(4):
        step()
    assert step.replays
    optimizer.scale = 10.0
    step()
    assert weight.item() == -28.0


def test_tensors_in_a_deque_count_by_identity() -> None:
    frames = [torch.zeros(84, 84, device="tarry") for _ in range(6)]
    for k, frame in enumerate(frames):
        frame[40, 40] = float(k)  # in the middle, which printing leaves out
    recent = deque(frames[:2], maxlen=2)
    step = tarry.compile(lambda x: torch.stack(list(recent)).sum() * x)
    x = torch.ones((), device="tarry")
    assert [step(x).item() for _ in range(4)] == [1.0] * 4
    assert step.replays
    for k, frame in enumerate(frames[2:], start=2):
        recent.append(frame)
        assert step(x).item() == k + (k - 1)


def test_code_without_a_module() -> None:
    namespace: dict[str, Any] = {"__name__": "not_imported"}
    exec("class A:\n  k = 2.0\n  def f(self, x): return x * self.k\na = A()\ndef step(x): return a.f(x)\n", namespace)
    step = tarry.compile(namespace["step"])
    x = torch.ones(3, device="tarry")
    assert [step(x).tolist() for _ in range(4)] == [[2.0] * 3] * 4
    assert step.replays
    namespace["A"].k = 5.0
    assert step(x).tolist() == [5.0] * 3


def test_a_step_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own package is the program, wherever it lies."""
    package = tmp_path / "tarry_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "settings.py").write_text("scale = 2.0\n")
    (package / "train.py").write_text("from . import settings\nB = 0.0\ndef step(x): return x * settings.scale + B\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("tarry.replay.code._FOREIGN", (*tarry.replay.code._FOREIGN, f"{tmp_path}/"))
    from tarry_test_package import settings, train  # type: ignore[import-not-found]

    step = tarry.compile(train.step)
    x = torch.ones(3, device="tarry")
    assert [step(x).tolist() for _ in range(4)] == [[2.0] * 3] * 4
    assert step.replays
    settings.scale = 5.0
    assert step(x).tolist() == [5.0] * 3
    train.B = 1.0
    assert step(x).tolist() == [6.0] * 3


def test_what_is_too_long_to_look_at() -> None:
    numbers = [1.0] * 20_000
    array = numpy.ones(1 << 20)
    for function in (lambda x: x * numbers[3], lambda x: x * float(array[3])):
        step = tarry.compile(function)
        for _ in range(4):
            step(torch.ones(3, device="tarry"))
        assert step.replays == 0
        assert "too many to look at" in step.explain()


def test_a_global_that_is_defined_later() -> None:
    def function(x: Tensor) -> Tensor:
        try:
            return x * DEFINED_LATER  # type: ignore[name-defined, no-any-return]
        except NameError:
            return x * 2.0

    step = tarry.compile(function)
    x = torch.ones(3, device="tarry")
    assert [step(x).tolist() for _ in range(4)] == [[2.0] * 3] * 4
    assert step.replays
    try:
        globals()["DEFINED_LATER"] = 5.0
        assert step(x).tolist() == [5.0] * 3
    finally:
        del globals()["DEFINED_LATER"]


def test_code_that_is_evaluated() -> None:
    step = tarry.compile(lambda x: eval("x * SCALE"))
    for _ in range(4):
        step(torch.ones(3, device="tarry"))
    assert step.replays == 0
    assert "it calls eval()" in step.explain()
