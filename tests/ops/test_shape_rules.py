"""Shape rules (csrc/record/shape_rules.cpp): all is as on the CPU, and wrong calls fail."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [size for size in SIZES if 0 not in size], ids=str)
def test_two_tensors_of_different_sizes(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    others = {sizes[1:], (1, *sizes[1:]), (*sizes[:-1], 1), (3, *sizes), (1,) * len(sizes), (*sizes, 5)}
    for other in others:
        for first, second in itertools.product(layouts(sizes, dtype), layouts(other, dtype)):
            for function in (torch.add, torch.sub, torch.mul, torch.div, torch.eq, torch.lt):
                check(function, (first, second))
                check(function, (second, first))


def test_numbers_beside_integers() -> None:
    for tensor in layouts((2, 1, 3), torch.int64):
        for number in (2, 2.5, True):
            for function in (torch.add, torch.sub, torch.mul, torch.div, torch.eq):
                check(lambda x, f=function, n=number: f(x, n), (tensor,))
        check(lambda x: torch.add(x, x, alpha=2), (tensor,))
        check(lambda x: torch.add(x, x, alpha=2.5), (tensor,))


def test_types_that_are_not_computed_with() -> None:
    check(torch.add, (torch.ones(3).to(torch.float8_e5m2),) * 2)
    check(torch.mm, (torch.ones(3, 3).to(torch.float8_e5m2),) * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_matrices(dtype: torch.dtype) -> None:
    for a, b in itertools.product(layouts((2, 3), dtype), layouts((3, 4), dtype)):
        check(torch.mm, (a, b))
        for sizes in ((4,), (1,), (2, 4), (1, 4), (3,), ()):
            check(torch.addmm, (torch.ones(sizes, dtype=dtype), a, b))
        check(lambda c, x, y: torch.addmm(c, x, y, beta=2, alpha=0.5), (torch.ones(4, dtype=dtype), a, b))
    check(torch.mm, (torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype)))
    check(torch.mm, (torch.ones(2, 3, dtype=dtype), torch.ones(3, 2)))
    check(torch.addmm, (torch.ones(4), torch.ones(2, 3, dtype=dtype), torch.ones(3, 4, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("normalized", [(3,), (1, 3), (4, 1, 3), (2, 4, 1, 3), (4,), (5, 2, 4, 1, 3)], ids=str)
def test_layer_norm(normalized: tuple[int, ...], dtype: torch.dtype) -> None:
    for tensor in layouts((2, 4, 1, 3), dtype):
        for sizes in (normalized, (7,)):
            weight = torch.ones(sizes, dtype=dtype)
            check(lambda x: torch.native_layer_norm(x, normalized, None, None, 1e-5), (tensor,))
            check(lambda x, w: torch.native_layer_norm(x, normalized, w, None, 1e-5), (tensor, weight))
            check(lambda x, w: torch.native_layer_norm(x, normalized, w, w, 1e-5), (tensor, weight))
            check(lambda x, w: torch.native_layer_norm(x, normalized, w, w, 1e-5), (tensor, weight.double()))


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


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_attention_with_shared_heads(heads: int) -> None:
    """Of keys and values, for several heads of the query."""
    query, key = torch.ones(2, 4, 3, 8), torch.ones(2, heads, 5, 8)
    check(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, (query, key, key))


def test_attention_on_a_cpu_draws_nothing() -> None:
    """It is tagged as random, but knows no dropout; no seed is drawn for it."""
    query = torch.ones(2, 4, 3, 8)
    with pytest.raises(RuntimeError, match="dropout"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query, dropout_p=0.5)
    before = torch.tarry.get_rng_state()  # type: ignore[attr-defined]
    F.scaled_dot_product_attention(*(query.to("tarry") for _ in range(3)))
    assert torch.equal(torch.tarry.get_rng_state(), before)  # type: ignore[attr-defined]
