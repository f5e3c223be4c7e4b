"""Compilers of other projects, through their torch.compile backends: `pip install tarry[compilers]` brings them.

They are not installed where the other tests run, and most of a test's time goes into their compiling.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tarry
from tarry.backends.dynamo import DynamoBackend, Traits
from tarry.events import Event, record
from tests.backends.test_dynamo import PROGRAMS, assert_trained_alike, reference, train

USES_DEVICE = True
pytestmark = pytest.mark.slow
STEPS = 10


@pytest.fixture(autouse=True)
def _back_to_eager() -> Iterator[None]:
    yield
    tarry.set_backend("eager")


def _openvino() -> DynamoBackend:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it sets an option of dynamo's that is gone
        return DynamoBackend("openvino")


def _onnxruntime() -> DynamoBackend:
    """torch.compile has no backend for it any more (as of 2.13), but it takes no more than this to have one."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason="ONNX Runtime and torch's exporter to ONNX are not installed")
    import onnxruntime

    def onnxrt(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        program = torch.onnx.export(module.eval(), tuple(examples), dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
        names = [argument.name for argument in session.get_inputs()]

        def run(*inputs: Tensor) -> list[Tensor]:
            given = dict(zip(names, (tensor.numpy() for tensor in inputs), strict=True))
            return [torch.from_numpy(result) for result in session.run(None, given)]

        return run

    missing = {
        "aten::convolution_backward",
        "aten::max_pool2d_with_indices_backward",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::_native_batch_norm_legit_functional",  # exported as if it were not training
    }
    return DynamoBackend(onnxrt, traits=Traits(without=frozenset(missing), custom_operators=False, strides=False))


BACKENDS: dict[str, Callable[[], DynamoBackend]] = {"openvino": _openvino, "onnxruntime": _onnxruntime}


def _ran_by(name: str) -> Callable[[], int]:
    """How many pieces of graphs a compiler really runs: OpenVINO leaves a piece to torch without a word."""
    if name != "openvino":
        return lambda: 1
    from openvino.frontend.pytorch.torchdynamo import execute

    execute.partitioned_modules.clear()

    def pieces() -> int:
        graphs = execute.partitioned_modules.values()
        found = [m for graph in graphs for m in graph.modules() if isinstance(m, execute.OpenVINOGraphModule)]
        assert not any(piece.perm_fallback for piece in found), "OpenVINO gave up on a piece of a graph"
        return len(found)

    return pieces


def _assert_compiled(seen: list[Event], most: int) -> None:
    kinds = [event.kind for event in seen]
    assert 0 < kinds.count("compile") <= most
    assert kinds.count("interpreted") == kinds.count("error") == 0


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", BACKENDS)
def test_training_is_that_of_the_cpu(name: str, program: str) -> None:
    backend = BACKENDS[name]()
    expected = reference(program, STEPS)
    tarry.set_backend(backend)
    pieces = _ran_by(name)
    with record() as seen:
        actual = train(program, "tarry", STEPS)
    _assert_compiled(seen, most=2)
    assert_trained_alike(actual, expected, 1e-3)
    assert pieces() > 0


@pytest.mark.parametrize("name", BACKENDS)
def test_inference_of_a_gpt(name: str) -> None:
    backend = BACKENDS[name]()
    torch.manual_seed(0)
    model = PROGRAMS["gpt"]().eval()
    batches = torch.randint(20, (3, 2, 8))
    with torch.no_grad():
        expected = [model(tokens) for tokens in batches]
        model.to("tarry")
        tarry.mark_step()
        tarry.set_backend(backend)
        pieces = _ran_by(name)
        with record() as seen:
            actual = [model(tokens.to("tarry")).cpu() for tokens in batches]
    _assert_compiled(seen, most=1)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert pieces() > 0


@pytest.mark.parametrize("name", BACKENDS)
def test_integers_and_doubles_keep_their_values(name: str) -> None:
    backend = BACKENDS[name]()
    programs: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
        "int64": (torch.full((4,), 2**40), lambda x: (x * 3 + x).sum()),
        "uint8": (torch.full((4,), 200, dtype=torch.uint8), lambda x: x * 3 + x),
        "float64": (torch.full((4,), 1 / 3, dtype=torch.float64), lambda x: (x * x + 1) * x),
        "large number": (torch.ones(4), lambda x: x * 2**40),
    }
    tarry.set_backend(backend)
    for what, (x, program) in programs.items():
        torch.testing.assert_close(program(x.to("tarry")).cpu(), program(x), msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize("name", BACKENDS)
def test_results_outlive_the_next_run(name: str) -> None:
    tarry.set_backend(BACKENDS[name]())
    x = torch.ones(3, device="tarry")
    tarry.mark_step()
    kept = []
    for _ in range(4):
        x = (x * 2).relu()
        tarry.mark_step()
        kept.append(x)
    assert [t[0].item() for t in kept] == [2.0, 4.0, 8.0, 16.0]
