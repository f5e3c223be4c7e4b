"""torch.compile inside a program on tarry: the same results as eager on the CPU, each node at the user's line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tarry
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

Wrap = Callable[[Any], Any]
Program = Callable[[str, Wrap], list[torch.Tensor]]
PROGRAMS: dict[str, tuple[Program, dict[str, Any]]] = {}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def program(**options: Any) -> Callable[[Program], Program]:
    """A program that is run with torch.compile(..., **options) in it on tarry, and without on the CPU."""

    def add(function: Program) -> Program:
        PROGRAMS[function.__name__] = (function, options)
        return function

    return add


def plain(function: Any) -> Any:
    return function


def values(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors]


class Block(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.project = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def train(device: str, wrap: Wrap, what: str, lengths: tuple[int, ...] = (5, 5, 5, 5)) -> list[torch.Tensor]:
    """A training loop in which the model, the optimizer's step or all of a step is compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)  # eps: gradients of key biases are rounding
    forward = wrap(model) if what == "model" else model
    update = wrap(lambda: optimizer.step()) if what == "optimizer" else optimizer.step
    if what == "in place" and wrap is not plain:
        model.compile()

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(forward(x).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        update()
        return loss

    whole = wrap(step) if what == "step" else step
    generator = torch.Generator().manual_seed(1)
    losses = []
    for length in lengths:
        x = torch.randn(2, length, 8, generator=generator).to(device)
        losses.append(whole(x, torch.randint(3, (2, length), generator=generator).to(device)))
    return values(*losses, *model.parameters())


@program(fullgraph=True)
def compiled_model(device: str, wrap: Wrap) -> list[torch.Tensor]:
    return train(device, wrap, "model")


@program(fullgraph=True, dynamic=True)
def lengths_that_vary(device: str, wrap: Wrap) -> list[torch.Tensor]:
    return train(device, wrap, "model", (5, 3, 7, 4))


@program()
def module_compile(device: str, wrap: Wrap) -> list[torch.Tensor]:
    return train(device, wrap, "in place")


@program()
def optimizer_step(device: str, wrap: Wrap) -> list[torch.Tensor]:
    return train(device, wrap, "optimizer")


@program()
def whole_step(device: str, wrap: Wrap) -> list[torch.Tensor]:
    return train(device, wrap, "step")


@program(backend="aot_eager")
def functional_graphs(device: str, wrap: Wrap) -> list[torch.Tensor]:
    return train(device, wrap, "model")


@program(backend="tarry", fullgraph=True)
def by_name(device: str, wrap: Wrap) -> list[torch.Tensor]:
    return train(device, wrap, "model")


@program()
def graph_breaks(device: str, wrap: Wrap) -> list[torch.Tensor]:
    @torch.compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    @wrap
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.sum() > 0:
            y = outside(y) + 1
        return y[y != 0] * y.sum().item()

    return values(f(torch.ones(3).to(device)), f(-torch.ones(3).to(device)))


@program(mode="reduce-overhead")
def tensors_made_inside(device: str, wrap: Wrap) -> list[torch.Tensor]:
    @wrap
    def f(n: int) -> torch.Tensor:
        return torch.arange(n, device=device).cumsum(0) + torch.zeros(1, device=device)

    return values(f(4), f(5))


@program(mode="max-autotune")
def writes_and_views(device: str, wrap: Wrap) -> list[torch.Tensor]:
    total = torch.zeros(3).to(device)

    @wrap
    def f(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        x.mul_(2)
        view = x[1:]
        view += 1
        return view

    x = torch.ones(3).to(device)
    return values(f(x), f(x), x, total)


@program(options={"max_autotune": False})
def both_devices(device: str, wrap: Wrap) -> list[torch.Tensor]:
    @wrap
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        on_host = (x + 1).cpu() * 2
        return on_host.to(device) + x, on_host

    return values(*f(torch.ones(3).to(device)))


@program(fullgraph=True)
def statistics(device: str, wrap: Wrap) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()).to(device)
    compiled = wrap(model)
    image = torch.linspace(-1, 1, 128).reshape(2, 1, 8, 8).to(device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=False):
        compiled(image).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.eval()
    with torch.inference_mode():
        result = compiled(image)
    return values(result, *model.state_dict().values(), *(g for g in gradients if g is not None))


@program(fullgraph=True)
def autograd_and_transforms(device: str, wrap: Wrap) -> list[torch.Tensor]:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return 3 * grads[0] * ctx.saved_tensors[0]

    @wrap
    def f(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda y: torch.tanh(Odd.apply(y)), x, use_reentrant=False)
        y = torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (y,))
        return y.sum() + torch.func.vmap(torch.func.grad(lambda z: (z**3).sum()))(x.detach()).sum()

    x = torch.arange(6.0).reshape(2, 3).to(device).requires_grad_()
    loss = f(x)
    loss.backward()
    assert x.grad is not None
    return values(loss, x.grad)


@program()
def second_derivative_and_hooks(device: str, wrap: Wrap) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).to(device)
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    layer.weight.register_hook(lambda gradient: gradient * 3)
    compiled = wrap(layer)
    x = torch.ones(2, 3).to(device).requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(x).pow(3).sum(), x, create_graph=True)
    gradient.sum().backward()
    assert layer.weight.grad is not None
    return values(gradient, layer.weight.grad)


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_on_the_cpu(name: str) -> None:
    function, options = PROGRAMS[name]
    expected = function("cpu", plain)
    got = function("tarry", lambda f: torch.compile(f, **options))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def _line() -> int:
    return sys._getframe(1).f_lineno


def test_every_node_has_the_line_it_was_traced_from() -> None:
    start = _line()

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return torch.relu(y + 1)

    for backend in ("inductor", "tarry"):
        graph = tarry.graph(torch.compile(f, backend=backend)(torch.ones(3, device="tarry")))
        lines = {node.op.partition(".")[0]: node.site for node in graph.nodes}
        for op, distance in (("sin", 3), ("add", 4), ("relu", 4)):
            site = lines[f"aten::{op}"]
            assert site is not None
            assert (site.file, site.line) == (__file__, start + distance)


def test_a_compiled_step_is_one_graph_that_ends_with_the_optimizer() -> None:
    model = nn.Linear(3, 3).to("tarry")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update = torch.compile(lambda: optimizer.step())
    with tarry.events.record() as seen:
        for _ in range(4):
            optimizer.zero_grad()
            torch.compile(model)(torch.ones(2, 3, device="tarry")).sum().backward()
            update()
    assert [event.fields["reason"] for event in seen if event.kind == "sync"] == ["optimizer.step"] * 4
    tarry.sync()


def test_one_line_says_so_and_names_the_place(caplog: pytest.LogCaptureFixture) -> None:
    from tarry import _api

    x = torch.ones(3, device="tarry")
    recorded = _api.Recorded(_api.places.is_users, lambda where, operations: None)
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    with caplog.at_level(logging.WARNING, "tarry"):
        assert recorded.program(graph)(x).tolist() == [2, 2, 2]
        line = _line() - 1
        recorded.program(graph)
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"torch.compile ({__file__}:{line})" in message
    assert "Inductor is not called" in message


def test_the_event_has_the_line() -> None:
    with tarry.events.record() as seen:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3, device="tarry"))
    (event,) = [event for event in seen if event.kind == "torch_compile"]
    assert (event.fields["file"], event.fields["line"], event.fields["operations"]) == (__file__, _line() - 2, 2)


def test_graphs_of_other_devices_go_to_their_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor itself takes seconds: what it is given is enough."""
    from torch._inductor import compile_fx as inductor

    original = inductor.compile_fx.__wrapped__
    given = []
    (cell,) = [cell for cell in inductor.compile_fx.__closure__ if cell.cell_contents is original]
    monkeypatch.setattr(cell, "cell_contents", lambda model, *args, **kwargs: given.append(model) or model.forward)
    compiled = torch.compile(lambda x: x + 1)
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert len(given) == 1
    assert compiled(torch.ones(3, device="tarry")).tolist() == [2, 2, 2]
    assert len(given) == 1


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(Exception, match=r"no tensor of this one is there. Move .* \.to\('tarry'\)"):
        torch.compile(lambda x: x + 1, backend="tarry")(torch.ones(3))
    exported = torch.export.export(nn.ReLU(), (torch.ones(3, device="tarry"),))
    with pytest.raises(RuntimeError, match="move_to_device_pass"):
        torch._inductor.aoti_compile_and_package(exported)


def test_errors_are_those_of_the_operator() -> None:
    """The same type as in eager (Dynamo's errors are RuntimeErrors), and nothing is lost."""
    x = torch.ones(3, device="tarry")
    with pytest.raises(RuntimeError, match=r"(?s)mat1|reduction dim|size mismatch"):
        torch.compile(lambda x: x[None] @ torch.ones(7, 2, device="tarry"))(x)
    assert x.tolist() == [1, 1, 1]


def test_dynamo_leaves_the_runtime_alone(recwarn: pytest.WarningsRecorder) -> None:
    """A read in a compiled function calls tarry's Python, where Dynamo would find much that it cannot trace."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sum().item()
        tarry.mark_step()
        return x * y

    assert torch.compile(f)(torch.ones(3, device="tarry")).tolist() == [3, 3, 3]
    assert not [warning for warning in recwarn if "tarry" in str(warning.message) or "_signal" in str(warning.message)]


def test_the_device_interface_answers() -> None:
    from torch._dynamo.device_interface import DeviceInterface, get_interface_for_device

    interface = get_interface_for_device("tarry")
    assert interface is get_interface_for_device(torch.device("tarry:0")) is get_interface_for_device("tarry:0")
    assert issubclass(interface, DeviceInterface)
    assert interface.is_available()
    assert not interface.is_triton_capable()
    assert interface.current_device() == 0
    assert interface.device_count() == torch.tarry.device_count()
    assert interface.maybe_exchange_device(-1) == 0
    assert interface.exchange_device(0) == 0
    assert interface.get_device_properties().name == "tarry"
    assert interface.Worker.current_device() == 0
    assert interface.is_bf16_supported()
    assert interface.memory_allocated() >= 0
    with interface.device(0), interface.stream(interface.current_stream()):
        interface.synchronize()
