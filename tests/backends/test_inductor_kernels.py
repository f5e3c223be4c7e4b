"""Kernels that Inductor generates for a CPU, compiled together (backends/inductor/kernels.py)."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch

from tarry.backends.base import Recording
from tarry.backends.inductor import InductorBackend, kernels, why_not
from tarry.backends.inductor.kernels import Kernel
from tarry.ir.graph import Graph
from tarry.native import C
from tarry.passes.specialize import specialize
from tarry.store import unpack

USES_DEVICE = True
needs_inductor = pytest.mark.skipif(bool(why_not("cpu")), reason="Inductor does not work here")

SOURCE = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <cmath>
static float helper(float x) {{ return x + {number}; }}
extern "C" void kernel(const float* in_ptr0, float* out_ptr0) {{ out_ptr0[0] = helper(std::floor(in_ptr0[0])); }}
"""


def _kernel(number: int) -> Kernel:
    return Kernel(["const float*", "float*"], SOURCE.format(number=number), contextlib.nullcontext)


def _call(kernel: Kernel, value: float) -> float:
    given, taken = torch.tensor([value]), torch.zeros(1)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (given, taken)]
    getattr(ctypes.CDLL(kernel.library), kernel.symbol)(*pointers)
    return taken.item()


@needs_inductor
@pytest.mark.slow
def test_kernels_of_one_file_do_not_meet() -> None:
    made = [_kernel(number) for number in (1, 10, 1)]
    kernels.build(made)
    assert len({kernel.library for kernel in made}) == 1
    assert [_call(kernel, 2.5) for kernel in made] == [3.0, 12.0, 3.0]


@needs_inductor
@pytest.mark.slow
def test_a_kernel_that_python_calls_is_bound() -> None:
    kernel, taken = _kernel(3), torch.zeros(1)
    for value in (1.0, 2.0):
        kernel(torch.tensor([value]), taken)
        assert taken.item() == value + 3
    assert not kernel.library


def test_files_are_of_about_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LEAST", 2 * len(_kernel(1).source))
    made = [_kernel(number) for number in range(9)]
    for most, lengths in ((1, [9]), (2, [4, 5]), (16, [2, 2, 2, 3])):
        files = kernels._files(made, most)
        assert [len(each) for each in files] == lengths
        assert [kernel for each in files for kernel in each] == made


@needs_inductor
@pytest.mark.slow
def test_graphs_that_are_compiled_at_once_share_a_library() -> None:
    def graph_of(y: torch.Tensor) -> tuple[Graph, Any]:
        batch = C.peek([y])
        return specialize(Recording(batch).graph("optimized"), dict(enumerate(batch.numbers()))), batch

    x = torch.linspace(-1, 1, 32).to("tarry")
    expected = (x.cpu().sin() + 1, x.cpu().cos() * 2)
    found = [graph_of(y) for y in (x.sin() + 1, x.cos() * 2)]
    made = InductorBackend().compile_all([graph for graph, _ in found])
    libraries = []
    for computation, (_, batch), values in zip(made, found, expected, strict=True):
        (result,) = computation.run(batch.inputs(), batch.numbers())
        torch.testing.assert_close(result, values)
        assert computation.native is not None
        assert computation.artifact is not None
        header, blobs = unpack(computation.artifact())
        assert header["listing"]["libraries"] == 1
        libraries.append(bytes(blobs[1]))
    assert libraries[0] == libraries[1]
