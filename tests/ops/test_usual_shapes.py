"""Shapes that are told without asking a kernel (csrc/usual.cpp): all is as on the CPU, and wrong calls fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

USES_DEVICE = True

SIZES = [
    (), (1,), (3,), (2, 1), (1, 3), (2, 3), (2, 1, 3), (1, 1, 1), (2, 4, 1, 3), (2, 1, 1, 1), (1, 3, 2, 2), (0, 3),
    (2, 0),
]  # fmt: skip
UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.neg, torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.sin, torch.cos, torch.erf, torch.tanh,
    torch.sigmoid, torch.relu, F.silu, F.gelu, torch.clone, lambda x: x.clone(memory_format=torch.contiguous_format),
    lambda x: torch.softmax(x, -1), lambda x: x + 1, lambda x: 2.5 * x, lambda x: x / 3, lambda x: 1 - x,
    lambda x: x > 0, lambda x: x == 1.5, lambda x: x == True, lambda x: torch.add(x, x, alpha=2),  # noqa: E712
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, torch.div, torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge,
    torch.bitwise_and, torch.bitwise_or, lambda a, b: torch.cat([a, b]), lambda a, b: torch.cat([a, b], -1),
    lambda a, b: torch.cat([a, b, a], 1), torch.bmm,
]  # fmt: skip


def layouts(sizes: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """Tensors of these sizes that lie in memory in various ways."""
    plain = torch.ones(sizes, dtype=dtype)
    yield plain
    if len(sizes) > 1:
        yield plain.mT.contiguous().mT
        yield torch.ones((*sizes, 2), dtype=dtype)[..., 0]
        yield torch.ones((1, *sizes[1:]), dtype=dtype).expand(sizes)
    if len(sizes) == 4:
        yield plain.contiguous(memory_format=torch.channels_last)
    if 1 in sizes and 0 not in sizes:  # the stride of such a dimension may be anything
        strides = [7 if size == 1 else stride for size, stride in zip(sizes, plain.stride(), strict=True)]
        yield plain.as_strided(sizes, strides)


def outcome(function: Callable[..., Any], arguments: tuple[Tensor, ...]) -> Any:
    try:
        results = function(*arguments)
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error)
    found = results if isinstance(results, tuple) else (results,)
    return [(tuple(result.shape), result.stride(), result.dtype) for result in found]


def on_tarry(tensor: Tensor) -> Tensor:
    """With the very same strides."""
    room = torch.empty(max(tensor.untyped_storage().nbytes() // tensor.element_size(), 1), dtype=tensor.dtype)
    return room.fill_(1).to("tarry").as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def check(function: Callable[..., Any], arguments: tuple[Tensor, ...]) -> None:
    assert outcome(function, tuple(map(on_tarry, arguments))) == outcome(function, arguments), arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_one_tensor(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    for function, tensor in itertools.product(UNARY, layouts(sizes, dtype)):
        check(function, (tensor,))


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.int64,) * 2, (torch.bool,) * 2, (torch.float32, torch.int64)]
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_two_tensors(sizes: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    other = (3, *sizes[1:]) if sizes else (2, 2)
    for function in BINARY:
        for first, second in itertools.product(layouts(sizes, dtypes[0]), layouts(sizes, dtypes[1])):
            check(function, (first, second))
        check(function, (torch.ones(sizes, dtype=dtypes[0]), torch.ones(other, dtype=dtypes[1])))


def test_embedding() -> None:
    for weight, sizes in itertools.product(layouts((5, 3), torch.float32), SIZES):
        check(lambda w, i: F.embedding(i - i, w), (weight, torch.ones(sizes, dtype=torch.int64)))
    check(F.embedding, (torch.ones(2), torch.ones(5, 3)))


def test_matrices_that_do_not_fit() -> None:
    check(torch.bmm, (torch.ones(2, 3, 4), torch.ones(2, 4, 5)))
    check(torch.bmm, (torch.ones(2, 3, 4).mT, torch.ones(2, 3, 5)))
    check(torch.bmm, (torch.ones(2, 3, 4), torch.ones(2, 3, 4)))
    check(torch.bmm, (torch.ones(1, 3, 4), torch.ones(2, 4, 3)))


def test_an_approximation_that_there_is_not() -> None:
    with pytest.raises(RuntimeError, match="approximate"):
        F.gelu(torch.ones(3, device="tarry"), approximate="tan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, (1, 1, 2, 5), (2, 3, 2, 5), (2, 5)], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "of several", "expanded"])
def test_attention(dtype: torch.dtype, mask: tuple[int, ...] | None, kind: str) -> None:
    def tensor(length: int) -> Tensor:
        match kind:
            case "contiguous":
                return torch.ones(2, 3, length, 4, dtype=dtype)
            case "transposed":
                return torch.ones(2, length, 3, 4, dtype=dtype).transpose(1, 2)
            case "of several":
                return torch.ones(2, length, 3, 3, 4, dtype=dtype).permute(2, 0, 3, 1, 4)[1]
        return torch.ones(1, 3, length, 4, dtype=dtype).expand(2, -1, -1, -1)

    arguments = tensor(2), tensor(5), tensor(5)
    if mask is not None:
        arguments = *arguments, torch.ones(mask, dtype=dtype)
    check(lambda q, k, v, *given: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=given[0] if given else None), arguments)  # fmt: skip
    check(F.scaled_dot_product_attention, arguments)
