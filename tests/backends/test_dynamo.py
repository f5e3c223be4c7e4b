"""Any torch.compile backend compiles steps: those of torch by name, functions, and functions that misbehave."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tarry
from tarry.backends.dynamo import DynamoBackend, Traits
from tarry.errors import BackendError
from tarry.events import expect, record
from tarry.examples.train_gpt import GPT, GPTConfig

USES_DEVICE = True
STEPS = 20
Compiler = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]


@pytest.fixture(autouse=True)
def _back_to_eager() -> Iterator[None]:
    yield
    tarry.set_backend("eager")


# ---- programs


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4)
    )


def _gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=20, layers=1, heads=2, width=16, context=8))


def _convnet() -> nn.Module:
    # No biases before a BatchNorm: their gradients are zero but for rounding, which AdamW blows up to whole steps.
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


def _batch(generator: torch.Generator, name: str) -> tuple[Tensor, Tensor]:
    if name == "gpt":
        return torch.randint(20, (3, 8), generator=generator), torch.randint(20, (3, 8), generator=generator)
    shape = (8, 16) if name == "mlp" else (4, 3, 12, 12)
    return torch.randn(shape, generator=generator), torch.randint(4, shape[:1], generator=generator)


PROGRAMS: dict[str, Callable[[], nn.Module]] = {"mlp": _mlp, "gpt": _gpt, "convnet": _convnet}


def train(name: str, device: str, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """Train a program; its losses and its state at the end."""
    torch.manual_seed(0)
    model = PROGRAMS[name]().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # an eps above rounding errors
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        inputs, targets = (tensor.to(device) for tensor in _batch(generator, name))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, {key: tensor.cpu() for key, tensor in model.state_dict().items()}


def reference(name: str, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """The same on CPU eager. Dropout draws other numbers there: its reference is tarry's own reference path."""
    if name != "mlp":
        return train(name, "cpu", steps)
    tarry.set_backend("eager")
    return train(name, "tarry", steps)


def assert_trained_alike(
    actual: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]], tolerance: float
) -> None:
    torch.testing.assert_close(torch.tensor(actual[0]), torch.tensor(expected[0]), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual[1], expected[1], rtol=tolerance, atol=tolerance)


# ---- compilers


def _forward(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    return module.forward


def _decomposing(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """What many compilers begin with."""
    return make_fx(module, decomposition_table=torch._decomp.core_aten_decompositions())(*examples)


COMPILERS: dict[str, str | Compiler] = {
    "eager": "dynamo:eager",
    "aot_eager": "dynamo:aot_eager",
    "aot_eager_decomp_partition": "dynamo:aot_eager_decomp_partition",
    "inductor": "dynamo:inductor",
    "function": _forward,
    "decomposing function": _decomposing,
}
_CASES = [
    pytest.param(
        compiler,
        program,
        id=f"{compiler}-{program}",
        marks=[pytest.mark.slow] if compiler == "inductor" else [],
    )
    for compiler in COMPILERS
    for program in PROGRAMS
    if (compiler, program) != ("inductor", "convnet")  # as the backend "inductor" has it, and slow to compile
]


@pytest.mark.parametrize(("compiler", "program"), _CASES)
def test_training_is_that_of_the_cpu(compiler: str, program: str) -> None:
    expected = reference(program)
    tarry.set_backend(COMPILERS[compiler])
    with record() as seen:
        actual = train(program, "tarry")
    kinds = [event.kind for event in seen]
    assert kinds.count("compile") <= 2, "the first step, which makes the optimizer's state, and the others"
    assert kinds.count("fallback") == kinds.count("interpreted") == kinds.count("error") == 0
    assert_trained_alike(actual, expected, 2e-4)


# ---- what it is given


def _given(compiler_of: Callable[[Compiler], None]) -> tuple[torch.fx.GraphModule, list[Tensor], FakeTensorMode]:
    """What a compiler is called with, and the fake mode that it would find."""
    calls: list[Any] = []

    def note(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        calls.append((module, examples, torch._guards.detect_fake_mode(examples)))
        return module.forward

    compiler_of(note)
    (call,) = calls
    return call


def _through_tarry(compiler: Compiler) -> None:
    tarry.set_backend(compiler)
    x = torch.randn(4, 6).to("tarry").t()
    y = F.dropout(x, 0.5) * 1.5
    a, b = y.split(3)
    (a + b).cpu()


def _through_dynamo(compiler: Compiler) -> None:
    @torch.compile(backend=compiler)
    def program(x: Tensor) -> Tensor:
        a, b = (x * 1.5).split(3)
        return a + b

    program(torch.randn(4, 6).t())


@pytest.mark.parametrize("through", [_through_tarry, _through_dynamo], ids=["tarry", "dynamo"])
def test_a_compiler_is_given_what_dynamo_would_give_it(through: Callable[[Compiler], None]) -> None:
    module, examples, mode = _given(through)
    assert isinstance(module, torch.fx.GraphModule)
    assert type(examples) is list
    placeholders = module.graph.find_nodes(op="placeholder")
    assert len(placeholders) == len(examples)
    for node, example in zip(placeholders, examples, strict=True):
        assert isinstance(example, Tensor)
        assert not isinstance(example, FakeTensor)
        fake = node.meta["example_value"]
        assert isinstance(fake, FakeTensor)
        assert (fake.shape, fake.dtype, fake.stride()) == (example.shape, example.dtype, example.stride())
    calls = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    assert all("example_value" in node.meta for node in calls)
    (output,) = module.graph.find_nodes(op="output")
    assert isinstance(output.args[0], tuple)
    assert placeholders[0].meta["example_value"].fake_mode.shape_env is mode.shape_env
    assert mode.shape_env.tracked_fakes is not None  # torch.export insists on it


def test_the_graph_is_flat_aten_with_a_value_for_each_node() -> None:
    module, examples, _ = _given(_through_tarry)
    for node in module.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        assert "val" in node.meta
        if node.op == "call_function" and node.target.__name__ != "getitem":
            assert isinstance(node.target, torch._ops.OpOverload)
            assert node.target.namespace in ("aten", "tarry_opaque")
            assert not node.target._schema.is_mutable
    (output,) = module.graph.find_nodes(op="output")
    for result, value in zip(module(*examples), output.args[0], strict=True):
        assert (result.shape, result.dtype) == (value.meta["val"].shape, value.meta["val"].dtype)


def test_the_text_of_the_compiled_graph() -> None:
    tarry.set_backend("dynamo:eager")
    x = torch.ones(3, device="tarry") * 2
    assert "torch.ops.aten.mul.Tensor" in tarry.explain(x, stage="compiled")


# ---- what it may return


@pytest.mark.parametrize("form", [tuple, list, lambda results: results[0]], ids=["tuple", "list", "tensor"])
def test_results_as_tuple_list_or_tensor(form: Callable[[Any], Any]) -> None:
    tarry.set_backend(lambda module, examples: lambda *inputs: form(module(*inputs)))
    x = torch.arange(3.0).to("tarry")
    tarry.mark_step()
    with expect(compiles=1, errors=0):
        y = x * 2 + 1  # not in the assertion, which would keep x * 2 for its message
        assert y.tolist() == [1.0, 3.0, 5.0]


def test_results_in_memory_that_the_next_run_overwrites() -> None:
    """Engines hand out the buffers that they compute in."""

    def engine(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        buffers = [result.numpy().copy() for result in module(*examples)]

        def run(*inputs: Tensor) -> list[Tensor]:
            for buffer in buffers:
                buffer.fill(float("nan"))  # as a kernel that writes before it has read everything
            for buffer, result in zip(buffers, module(*inputs), strict=True):
                buffer[...] = result.numpy()
            return [torch.from_numpy(buffer) for buffer in buffers]

        return run

    tarry.set_backend(engine)
    x = torch.ones(3, device="tarry")
    tarry.mark_step()
    kept = []
    for _ in range(4):
        x = x * 2
        tarry.mark_step()
        kept.append(x)
    assert [t[0].item() for t in kept] == [2.0, 4.0, 8.0, 16.0]


@pytest.mark.parametrize("owned", [True, False])
def test_results_are_copied_unless_the_compiler_is_known_to_make_them_anew(owned: bool) -> None:
    made: list[int] = []

    def noting(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        def run(*inputs: Tensor) -> Any:
            results = module(*inputs)
            made.append(results[0].data_ptr())
            return results

        return run

    x = torch.ones(3, device="tarry")
    tarry.mark_step()
    graph = tarry.graph(x * 2, stage="optimized")
    (result,) = DynamoBackend(noting, traits=Traits(owned_results=owned)).compile(graph).run([torch.ones(3)], [2])
    assert (made == [result.data_ptr()]) is owned


# ---- misbehaviour


def test_a_compiler_that_raises_leaves_the_step_to_the_reference_path() -> None:
    def picky(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        try:
            raise KeyError("no kernel for mul")
        except KeyError as error:
            raise ValueError("cannot compile\nfor many reasons") from error

    tarry.set_backend(picky)
    x = torch.arange(3.0).to("tarry")
    with warnings.catch_warnings(record=True) as seen, record() as events:
        warnings.simplefilter("always")
        for _ in range(3):
            x = x * 2
            tarry.mark_step()
    assert x.tolist() == [0.0, 8.0, 16.0]
    (warning,) = seen
    assert "dynamo:picky gave up: ValueError: cannot compile (KeyError: 'no kernel for mul')" in str(warning.message)
    assert sum(event.kind == "interpreted" for event in events) == 3


def test_a_compiler_that_returns_nothing_callable() -> None:
    tarry.set_backend(lambda module, examples: 3)
    with pytest.warns(UserWarning, match=r"dynamo:<lambda> gave 3, which cannot be called"):
        assert (torch.ones(2, device="tarry") * 2).tolist() == [2.0, 2.0]


def _raises(module: torch.fx.GraphModule, *inputs: Tensor) -> Any:
    raise ArithmeticError("out of order")


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (_raises, "out of order"),
    "too few results": (lambda module, *inputs: module(*inputs)[:-1], "results for 2 outputs"),
    "not tensors": (lambda module, *inputs: [1.0, 2.0], "is a float, not a tensor"),
    "another dtype": (lambda module, *inputs: [t.double() for t in module(*inputs)], "float64"),
    "another shape": (lambda module, *inputs: [t[None] for t in module(*inputs)], "shape"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_program_that_fails_is_named_and_the_values_are_valid(fault: str) -> None:
    run, message = FAULTS[fault]

    def faulty(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        return lambda *inputs: run(module, *inputs)

    tarry.set_backend("eager")
    x = torch.arange(3.0).to("tarry")
    tarry.mark_step()
    tarry.set_backend(faulty)
    y, z = x * 2, x + 1
    with pytest.raises(BackendError, match=rf"dynamo:faulty(.|\n)*{message}"):
        tarry.mark_step()
    assert (x.tolist(), y.tolist(), z.tolist()) == ([0.0, 1.0, 2.0], [0.0, 2.0, 4.0], [1.0, 2.0, 3.0])


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BackendError, match=r"no backend 'inductr'(.|\n)*aot_eager.*inductor"):
        tarry.set_backend("dynamo:inductr")
    assert tarry.get_backend().name == "eager"


# ---- options


def test_mode_and_options_are_passed_on() -> None:
    given: list[Any] = []

    def compiler(module: torch.fx.GraphModule, examples: list[Tensor], **keywords: Any) -> Callable[..., Any]:
        given.append(keywords)
        return module.forward

    x = torch.ones(2, device="tarry")
    for backend in (
        DynamoBackend(compiler),
        DynamoBackend(compiler, mode="fast", options={"level": 3}),
        DynamoBackend(compiler, traits=Traits(options={"a": {"x": 1, "y": 1}, "b": 1}), options={"a": {"y": 2}}),
    ):
        tarry.set_backend(backend)
        (x * 2).cpu()
    assert given == [{}, {"mode": "fast", "options": {"level": 3}}, {"options": {"a": {"x": 1, "y": 2}, "b": 1}}]


def test_options_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx

    given: list[Any] = []

    def compile_fx(module: torch.fx.GraphModule, examples: list[Tensor], **keywords: Any) -> Callable[..., Any]:
        given.append(keywords["config_patches"])
        return module.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    tarry.set_backend(DynamoBackend("inductor", mode="max-autotune-no-cudagraphs", options={"cpp.threads": 1}))
    (torch.ones(2, device="tarry") * 2).cpu()
    (patches,) = given
    assert patches["max_autotune"]
    assert patches["cpp.threads"] == 1
    with pytest.raises(BackendError, match="no_such_option"):
        DynamoBackend("inductor", options={"no_such_option": 1})


# ---- traits


def _with(traits: Traits) -> list[torch.fx.GraphModule]:
    """Use a compiler with these traits; the list fills with the graphs that it is given."""
    modules: list[torch.fx.GraphModule] = []

    def compiler(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        modules.append(module)
        return lambda *inputs: [result.contiguous() for result in module(*inputs)]

    tarry.set_backend(DynamoBackend(compiler, traits=traits))
    return modules


def _targets(modules: list[torch.fx.GraphModule]) -> set[str]:
    return {str(node.target) for module in modules for node in module.graph.nodes if node.op == "call_function"}


def test_without_custom_operators_random_ones_run_on_the_real_device() -> None:
    expected = reference("mlp")
    modules = _with(Traits(custom_operators=False))
    with record() as seen:
        actual = train("mlp", "tarry")
    assert_trained_alike(actual, expected, 2e-4)
    assert {event.fields["op"] for event in seen if event.kind == "fallback"} == {"aten::native_dropout"}
    assert modules
    assert not any(target.startswith("tarry_opaque") for target in _targets(modules))


def test_attention_is_hidden_or_left_out() -> None:
    expected = reference("gpt", 3)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    for traits, fell_back in ((Traits(), False), (Traits(custom_operators=False), True)):
        modules = _with(traits)
        with record() as seen:
            actual = train("gpt", "tarry", 3)
        assert_trained_alike(actual, expected, 2e-4)
        assert any(event.kind == "fallback" for event in seen) == fell_back
        assert f"aten.{attention}.default" not in _targets(modules)
        assert any(target.startswith(f"tarry_opaque.aten_{attention}") for target in _targets(modules)) != fell_back


def test_without_an_operator_it_is_decomposed_or_runs_on_the_real_device() -> None:
    expected = reference("convnet", 5)
    missing = frozenset({"aten::_native_batch_norm_legit_functional", "aten::convolution_backward"})
    modules = _with(Traits(without=missing))
    with record() as seen:
        actual = train("convnet", "tarry", 5)
    assert_trained_alike(actual, expected, 2e-4)
    assert {event.fields["op"] for event in seen if event.kind == "fallback"} == {"aten::convolution_backward"}
    assert not any("batch_norm_legit" in t or "convolution_backward" in t for t in _targets(modules))


def test_core_aten_only() -> None:
    expected = reference("gpt", 3)
    modules = _with(Traits(core_aten=True))
    with record() as seen:
        actual = train("gpt", "tarry", 3)
    assert_trained_alike(actual, expected, 2e-4)
    assert not any(event.kind == "fallback" for event in seen)
    assert _targets(modules).isdisjoint({"aten.native_layer_norm_backward.default", "aten.lerp.Tensor"})


def test_without_strides_what_counts_elements_runs_on_the_real_device() -> None:
    def program(device: str) -> list[Tensor]:
        base = torch.arange(20.0).to(device).view(5, 4)
        permuted = (base * 2).t().exp2()
        whole = (base * 3)[1:].clone()
        windows = [permuted.as_strided((3, 5), (3, 2), 1), whole.unfold(0, 2, 1), permuted.view(torch.int32)]
        return [window + 1 for window in windows]

    expected = program("cpu")
    modules = _with(Traits(strides=False))
    with record() as seen:
        actual = program("tarry")
        tarry.mark_step()
    assert [t.tolist() for t in actual] == [t.tolist() for t in expected]
    fell_back = {event.fields["op"] for event in seen if event.kind == "fallback"}
    assert fell_back == {"aten::as_strided", "aten::view.dtype"}
    assert modules


def test_dtypes_that_are_not_exact_stay_on_the_real_device() -> None:
    def program(device: str) -> list[Tensor]:
        x = torch.arange(4, device=device)
        return [(x * 2**40).float() / 3, torch.ones(4, device=device) * 2]

    expected = program("cpu")
    modules = _with(Traits(dtypes=frozenset({torch.float32, torch.bool})))
    with record() as seen:
        actual = program("tarry")
        tarry.mark_step()
    assert [t.tolist() for t in actual] == [t.tolist() for t in expected]
    assert "aten::mul.Tensor" in {event.fields["op"] for event in seen if event.kind == "fallback"}
    values = [node.meta["val"] for module in modules for node in module.graph.nodes if node.op == "call_function"]
    assert values
    assert not any(value.dtype == torch.int64 for value in values)


def test_whole_numbers_are_no_inputs_where_int64_is_not_exact() -> None:
    modules = _with(Traits(dtypes=frozenset({torch.float32})))
    x = torch.ones(2, device="tarry")
    tarry.mark_step()
    for k in (3, 2**40, 5):
        assert (x * k).tolist() == [float(k)] * 2
    inputs = [node.meta["val"].dtype for module in modules for node in module.graph.find_nodes(op="placeholder")]
    assert inputs
    assert torch.int64 not in inputs
