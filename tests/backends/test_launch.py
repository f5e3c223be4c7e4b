"""Inductor's programs as lists of instructions: used for what models consist of, and equal to what Python runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tarry
from tarry.backends.base import Recording
from tarry.backends.fx import FxProgram
from tarry.backends.fx.symbolic import SymbolicFxProgram
from tarry.backends.inductor import InductorBackend, why_not
from tarry.backends.inductor.launch import NotUnderstoodError, read_list
from tarry.native import C
from tarry.passes.specialize import specialize

USES_DEVICE = True

needs_inductor = pytest.mark.skipif(bool(why_not("cpu")), reason="Inductor does not work here")


def _conv(x: Tensor) -> Tensor:
    return F.conv2d(x.view(1, 2, 4, 4), torch.ones(3, 2, 3, 3, device=x.device)).relu() * 2


def _attention(x: Tensor) -> Tensor:
    q = x.view(1, 2, 4, 4)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True) + 1


@needs_inductor
@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        lambda x: (x.view(4, 8) @ x.view(8, 4)).relu() + 0.5,
        lambda x: torch.bmm(x.view(2, 4, 4), x.view(2, 4, 4)).softmax(-1),
        lambda x: torch.cat([x.view(4, 8).t().sin(), x.view(8, 4).sort().values]),
        _conv,
        _attention,
    ],
    ids=["mm", "bmm", "cat and sort", "conv", "attention"],
)
def test_native_and_python_agree(program: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(-1, 1, 32)
    tarry.set_backend("inductor")
    try:
        y = program(x.to("tarry"))
        batch = C.peek([y])
        numbers = dict(enumerate(batch.numbers()))
        computation = InductorBackend().compile(specialize(Recording(batch).graph("optimized"), numbers))
        assert computation.native is not None
        (by_python,) = computation.run(batch.inputs(), batch.numbers())
        assert torch.equal(y.cpu(), by_python)
    finally:
        tarry.set_backend("eager")
    torch.testing.assert_close(by_python, program(x))


@needs_inductor
@pytest.mark.slow
def test_a_number_where_a_tensor_is_expected_is_left_to_python() -> None:
    tarry.set_backend("inductor")
    try:
        x = torch.tensor([1 + 2j, 3j])
        assert torch.equal((x.to("tarry") + 2.5).cpu(), x + 2.5)
    finally:
        tarry.set_backend("eager")


def _launch(source: str, scope: dict[str, Any], inputs: int = 1, outputs: int = 1, symbols: int = 0) -> Any:
    """What is made of a program of these statements. The first parameters are the symbols, if there are any."""
    indented = "\n".join(f"    {line}" for line in source.strip().splitlines())
    text = f"def call(args):\n    {', '.join(f'arg{k}_1' for k in range(symbols + inputs))}, = args\n{indented}\n"
    scope = {"torch": torch, "aten": torch.ops.aten, **scope}
    exec(text, scope)
    graph: Any = SimpleNamespace(inputs=[None] * inputs, outputs=[None] * outputs, numbers=[])
    fields: Any = (graph, torch.device("cpu"), [], frozenset(), None)
    program = SymbolicFxProgram(*fields, symbols) if symbols else FxProgram(*fields)
    try:
        return read_list(scope["call"], text, program)[0].link()
    except NotUnderstoodError:
        return None


def test_a_program_of_known_statements_is_taken() -> None:
    made = _launch("buf0 = torch.ops.aten.sin.default(arg0_1)\ndel arg0_1\nreturn (buf0, )", {})
    assert isinstance(made, C.Program)


def test_views_that_a_call_is_given_are_dropped_after_it() -> None:
    """They would keep the buffers that they look at until the program ends, however early those are deleted."""
    statements = (
        "buf0 = torch.ops.aten.sin.default(reinterpret_tensor(arg0_1, (4, ), (1, ), 0))\n"
        "buf1 = reinterpret_tensor(buf0, (2, 2), (2, 1), 0); del buf0\n"
        "buf2 = torch.ops.aten.cos.default(buf1); del buf1\n"
        "return (reinterpret_tensor(buf2, (4, ), (1, ), 0), )"
    )
    text = "def call(args):\n    arg0_1, = args\n    " + statements.replace("\n", "\n    ") + "\n"
    scope: dict[str, Any] = {"torch": torch}
    exec(text, scope)
    graph = SimpleNamespace(inputs=[None], outputs=[None], numbers=[])
    program = SimpleNamespace(graph=graph, vectors=[], in_place=frozenset())
    made, _ = read_list(scope["call"], text, program)  # type: ignore[arg-type]
    kept = set(range(made.registers)) - {0}  # the input, which its caller drops
    for instruction in made.instructions:
        kept -= set(instruction["drops"])
    (result,) = made.results
    last = made.instructions[-1]
    assert (last["kind"], last["targets"]) == ("view", [result])
    assert kept == {result, *last["sources"]}, "the result, and what it looks at"


@pytest.mark.parametrize(
    "statements",
    [
        "buf0 = helper(arg0_1)\nreturn (buf0, )",
        "for i in range(2):\n    arg0_1 = arg0_1 + 1\nreturn (arg0_1, )",
        "buf0 = arg0_1 + 1\nreturn (buf0, )",
        "buf0 = torch.ops.custom_launch.f.default(arg0_1)\nreturn (buf0, )",
        "buf0 = torch.ops.aten.split.Tensor(arg0_1, 1)\nreturn (buf0, )",
        "buf0 = torch.ops.aten.sin.default(other)\nreturn (buf0, )",
        "buf0 = torch.ops.aten.sin.default(arg0_1, surprise=1)\nreturn (buf0, )",
        "if True:\n    pass\nreturn (arg0_1, )",
        "buf0 = torch.ops.aten.sin.default(arg0_1)",
        "return buf0",
    ],
)
def test_anything_else_is_left_to_python(statements: str) -> None:
    library = torch.library.Library("custom_launch", "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    try:
        assert _launch(statements, {"helper": abs}) is None
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("size", "taken"),
    [("s7", True), ("1 + 2*s7", True), ("s7*s7 - 3", True), ("s7 // 2", False), ("max(1, s7)", False)],
)
def test_sizes_that_depend_on_symbols(size: str, taken: bool) -> None:
    statements = f"""
s7 = arg0_1
buf0 = empty_strided_cpu(({size}, 2), (2, 1), torch.float32)
buf1 = reinterpret_tensor(arg1_1, (2, {size}), (1, 2), {size})
del arg1_1
return (buf0, buf1, )
"""
    scope = {"empty_strided_cpu": torch.empty_strided, "reinterpret_tensor": torch.as_strided}
    assert isinstance(_launch(statements, scope, outputs=2, symbols=1), C.Program if taken else type(None))


def test_constants_travel_with_the_program() -> None:
    made = _launch(
        "buf0 = torch.ops.aten.add.Tensor(arg0_1, held)\nreturn (buf0, )", {"held": torch.tensor([1.0, 2.0])}
    )
    assert isinstance(made, C.Program)


@needs_inductor
@pytest.mark.slow
def test_dropout_is_native_and_draws_as_the_reference_path() -> None:
    def train(backend: str) -> list[Tensor]:
        tarry.set_backend(backend)
        torch.manual_seed(0)
        blocks = [(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3)) for _ in range(4)]
        net = torch.nn.Sequential(*(layer for block in blocks for layer in block)).to("tarry")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for _ in range(8):
            loss = net(torch.ones(4, 16, device="tarry")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        return losses

    try:
        expected = train("eager")
        C.reset_counters(0)
        actual = train("inductor")
        assert C.counters(0).get("run_ahead", 0) > 0, "it runs without Python, so it can run ahead"
    finally:
        tarry.set_backend("eager")
    torch.testing.assert_close(actual, expected)
