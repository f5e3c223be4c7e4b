"""Arguments of every type reach the kernel unchanged, with every backend, whether the operator writes or not."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import tarry
from tests.support import fallbacks

USES_DEVICE = True


class Mode(enum.StrEnum):
    UP = "up"
    DOWN = "down"


EXAMPLES: dict[str, tuple[Any, list[Any]]] = {
    "optional tensor": (Tensor | None, [None]),
    "optional tensors": (list[Tensor | None], [[None, None]]),
    "int": (int, [3]),
    "optional int": (int | None, [None, 3]),
    "ints": (list[int], [[1, 2], []]),
    "optional ints": (list[int] | None, [None, [1]]),
    "float": (float, [2.5, float("inf")]),
    "optional float": (float | None, [None, 2.5]),
    "floats": (list[float], [[1.5, 2.5]]),
    "bool": (bool, [True]),
    "bools": (list[bool], [[True, False]]),
    "str": (str, ["s"]),
    "optional str": (str | None, [None, "s"]),
    "strs": (list[str], [["p", "q"]]),
    "Scalar": (int | float, [7, 1.5, True]),
    "optional Scalar": (int | float | None, [None, 7]),
    "Scalars": (list[int | float], [[1, 2.5]]),
    "dtype": (torch.dtype, [torch.float64]),
    "optional dtype": (torch.dtype | None, [None, torch.int32]),
    "layout": (torch.layout, [torch.strided]),
    "memory format": (torch.memory_format, [torch.channels_last]),
    "tuple": (tuple[int, int], [[4, 5]]),
    "Literal": (Literal["a", "b"], ["a"]),
    "StrEnum": (Mode, [Mode.DOWN]),
}


@pytest.fixture(params=["eager", "torchscript", pytest.param("inductor", marks=pytest.mark.slow)], scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    before = tarry.get_backend()
    tarry.set_backend(request.param)
    yield request.param
    tarry.set_backend(before)


@pytest.mark.parametrize("writes", [False, True], ids=["pure", "writes"])
@pytest.mark.parametrize("kind", EXAMPLES)
def test_type(kind: str, writes: bool, backend: str) -> None:
    annotation, examples = EXAMPLES[kind]

    def typed(x, value): ...

    typed.__annotations__ = {"x": Tensor, "value": annotation, "return": Tensor}
    op = tarry.custom_op("optest::typed", mutates_args=("x",) if writes else ())(typed)
    seen = []

    @op.impl("cpu")
    def _(x, value):
        seen.append(value)
        return x.add_(1) * 2 if writes else x * 2

    op.impl_abstract()(lambda x, value: torch.empty_like(x))
    for example in examples:
        x = torch.ones(2, device="tarry")
        assert op(x, example).tolist() == ([4.0, 4.0] if writes else [2.0, 2.0])
        assert x.tolist() == ([2.0, 2.0] if writes else [1.0, 1.0])
        assert seen[-1] == example
        assert type(seen[-1]) is (str if isinstance(example, str) else type(example))
    assert not fallbacks()
    assert not tarry.metrics.counters().get("interpreted", 0)


def test_everything_that_can_be_written_to(backend: str) -> None:
    @tarry.custom_op("optest::every_write", mutates_args="unknown")
    def every_write(w: list[Tensor | None], z: list[Tensor], y: Tensor | None, x: Tensor) -> None: ...

    @every_write.impl("cpu")
    def _(w, z, y, x):
        for tensor in (*w, *z, y, x):
            if tensor is not None:
                tensor.add_(1)

    every_write.impl_abstract()(lambda w, z, y, x: None)
    tensors = [torch.zeros(2, device="tarry") for _ in range(4)]
    every_write([tensors[0], None], [tensors[1]], tensors[2], tensors[3])
    every_write([None], [], None, tensors[3][:1])
    assert [t.tolist() for t in tensors] == [[1.0, 1.0]] * 3 + [[2.0, 1.0]]
    assert not fallbacks()


def test_a_device_is_the_real_one(backend: str) -> None:
    @tarry.custom_op("optest::placed")
    def placed(x: Tensor, device: torch.device) -> Tensor: ...

    placed.impl("cpu")(lambda x, device: torch.ones(2, device=device))
    placed.impl_abstract()(lambda x, device: torch.empty(2, device=device))
    x = torch.ones(2, device="tarry")
    assert placed(x, x.device).tolist() == [1.0, 1.0]
    assert not fallbacks()
