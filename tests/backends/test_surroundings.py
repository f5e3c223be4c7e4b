"""A value may be asked for anywhere. What is switched on there has had its effect on what was recorded: while a backend
compiles and runs, it sees none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tarry
from tarry.errors import TarryError
from tarry.ir.graph import Graph
from tarry.native import C
from tests.backends.simple import Walking, using
from tests.backends.simulated import Accelerator, Handle

USES_DEVICE = True


def _check_plain(where: str) -> None:
    """Real tensors are made on the real device, in their own precision, as ordinary tensors."""
    made = torch.ones(2, 2)
    assert made.device.type == "cpu", f"{where}: a default device acts"
    assert (made @ made).dtype == torch.float32, f"{where}: autocast acts"
    assert type(made + 1) is torch.Tensor, f"{where}: a mode acts"
    assert not (made + 1).is_inference(), f"{where}: inference mode acts"
    assert torch.tensor([1.0, 2.0]).sum().item() == 3.0, f"{where}: a transform acts"
    assert torch.from_numpy(made.numpy()).device.type == "cpu", where
    made.add_(1).zero_()
    made.requires_grad_()


class Careful(Walking):
    """Builds real tensors and uses modes itself, wherever its code is called."""

    name = "careful"

    def setup(self) -> None:
        _check_plain("setup")

    def teardown(self) -> None:
        _check_plain("teardown")

    def compile(self, graph: Graph) -> Any:
        _check_plain("compile")
        assert not torch.is_grad_enabled()
        assert torch._C._len_torch_function_stack() == 0
        assert torch._C._len_torch_dispatch_stack() == 0
        with FakeTensorMode() as mode:
            fake = torch.empty(3)
            traced = make_fx(lambda x: x.sin() + 1)(fake)
        assert fake.fake_mode is mode
        assert [node.op for node in traced.graph.nodes].count("call_function") == 2
        with torch.device("meta"):
            assert torch.empty(2).is_meta
        leaf = torch.ones(2, requires_grad=True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(leaf.sin().sum(), leaf)
        assert gradient.shape == (2,)
        run = super().compile(graph)

        def checked(inputs: list[Any], numbers: list[Any]) -> Any:
            _check_plain("run")
            for tensor in inputs:
                assert type(tensor) is torch.Tensor
            return run(inputs, numbers)

        return checked


class CarefulAccelerator(Accelerator):
    """The same for a backend with data of its own."""

    def to_data(self, tensor: torch.Tensor) -> Handle:
        _check_plain("to_data")
        return super().to_data(tensor)

    def to_tensor(self, data: Handle) -> torch.Tensor:
        _check_plain("to_tensor")
        return super().to_tensor(data)

    def compile(self, graph: Graph) -> Any:
        run = super().compile(graph)

        def checked(inputs: list[Any], numbers: list[Any]) -> Any:
            _check_plain("run")
            return run(inputs, numbers)

        return checked


class Doubling(TorchDispatchMode):
    """Would double whatever it sees computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and isinstance(result, torch.Tensor) and result.device.type == "cpu":
            return torch.ops.aten.mul.Tensor(result, 2)
        return result


class Renaming(TorchFunctionMode):
    """Would put everything that is made on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.ones, torch.empty, torch.zeros, torch.tensor) and "device" not in kwargs:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("tarry")
    try:
        yield
    finally:
        torch.set_default_device(None)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast of tarry": lambda: torch.autocast("tarry", dtype=torch.bfloat16),
    "no grad": torch.no_grad,
    "enable grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "with device": lambda: torch.device("tarry"),
    "with device meta": lambda: torch.device("meta"),
    "default device": _default_device,
    "dispatch mode": Doubling,
    "function mode": Renaming,
    "fake mode": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "no functions": torch._C.DisableTorchFunction,
}


@pytest.mark.parametrize("kind", [Careful, CarefulAccelerator])
@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_a_step_is_cut_apart_from_what_is_switched_on(surrounding: Callable[[], Any], kind: type[Walking]) -> None:
    a = torch.linspace(0, 1, 64).view(8, 8)
    expected = (a @ a + a.sum(0)).sin()
    with using(kind()) as backend:
        x = a.to("tarry")
        y = (x @ x + x.sum(0)).sin()
        with surrounding():
            tarry.mark_step()
        assert backend.runs == 1
        assert torch.equal(y.cpu(), expected)
        y.mul_(2)  # what was made there can be written here
        assert torch.equal(y.cpu(), expected * 2)
        z = x + y
        with surrounding():
            tarry.sync(z)  # a program that is compiled already
        z = x + y
        with surrounding():
            tarry.sync(z)
        assert torch.equal(z.cpu(), a + expected * 2)
        assert not C.materialise(z).is_inference()


@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_backends_are_changed_apart_from_what_is_switched_on(surrounding: Callable[[], Any]) -> None:
    with using(CarefulAccelerator()):
        x = torch.arange(3.0).to("tarry") + 1
        tarry.mark_step()
        with surrounding():
            tarry.set_backend(Careful())
        assert (x + 1).tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("kind", [Careful, CarefulAccelerator])
def test_values_read_inside_transforms(kind: type[Walking]) -> None:
    with using(kind()) as backend:
        x = torch.arange(6.0).view(3, 2).to("tarry")
        other = torch.ones(2).to("tarry") + 1

        def function(row: torch.Tensor) -> torch.Tensor:
            return row * other.sum().item()

        assert torch.func.vmap(function)(x).tolist() == (torch.arange(6.0).view(3, 2) * 4).tolist()
        gradient = torch.func.grad(lambda row: (row * other.sum().item()).sum())(x[0])
        assert gradient.tolist() == [4.0, 4.0]
        _, tangent = torch.func.jvp(lambda row: row * other.mean().item(), (x[0],), (x[1],))
        assert tangent.tolist() == [4.0, 6.0]
        assert backend.runs >= 3


@pytest.mark.parametrize("kind", [Careful, CarefulAccelerator])
def test_values_read_on_the_autograd_thread(kind: type[Walking]) -> None:
    seen: list[float] = []
    with using(kind()):
        x = torch.arange(3.0).to("tarry").requires_grad_()
        y = x * 2
        y.register_hook(lambda gradient: seen.append(gradient.sum().item()))
        x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.sum().item()))
        y.square().sum().backward()
        assert seen == [12.0, 24.0]
        assert x.grad.tolist() == [0.0, 8.0, 16.0]


def test_values_read_in_a_mode_that_looks_at_each_operator() -> None:
    class Reading(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.sin.default:
                seen.append(result.sum().item())
            return result

    seen: list[float] = []
    with using(Careful()):
        x = torch.zeros(3).to("tarry")
        with Reading():
            y = (x.sin() + 1).sin()
        assert seen == [0.0, pytest.approx(3 * torch.ones(()).sin().item())]
        torch.testing.assert_close(y.cpu(), torch.ones(3).sin())


def test_parameters_of_a_training_step_read_in_inference_mode_go_on_training() -> None:
    def train(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 1).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with tarry.config.override(cut_after_optimizer=False):
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.ones(2, 3).to(device)).square().sum().backward()
                optimizer.step()
                with torch.inference_mode():
                    net(torch.ones(1, 3).to(device)).cpu()
        return net.weight.detach().cpu()

    expected = train("cpu")
    for backend in (Careful(), CarefulAccelerator(), "eager"):
        with using(backend):
            torch.testing.assert_close(train("tarry"), expected)


def test_a_backend_that_asks_for_a_lazy_value_while_it_compiles_is_told_off() -> None:
    class Curious(Walking):
        def compile(self, graph: Graph) -> Any:
            other.item()
            return super().compile(graph)

    with using(Curious()):
        other = torch.ones(()).to("tarry") + 1
        x = torch.ones(3).to("tarry") + 1
        with pytest.raises(TarryError, match="while a backend compiles"):
            x.cpu()
        tarry.set_backend("eager")
        assert x.tolist() == [2.0] * 3
        assert other.item() == 2.0


def test_a_backend_that_asks_for_a_lazy_value_while_it_runs_is_told_off() -> None:
    class Curious(Walking):
        def compile(self, graph: Graph) -> Any:
            super().compile(graph)
            return lambda inputs, numbers: [(torch.ones(3, device="tarry") + 1).cpu()]

    with using(Curious()):
        x = torch.ones(3).to("tarry") + 1
        with pytest.raises(TarryError, match="in the middle of a step"):
            x.cpu()
        assert x.tolist() == [2.0] * 3
