"""Comparing tensors bit by bit, and by what an abstract implementation promises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same bits: NaN is NaN, and -0.0 is not 0.0."""
    if one.dtype != other.dtype:
        return False
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    a, b = (tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for tensor in (one, other))
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def difference(
    name: str, made: torch.Tensor, promise: torch.Tensor, promised: str, is_: str, *, device: bool = True
) -> Iterator[str]:
    """In what two tensors differ besides their values. Sizes of `promise` that are symbols stand for any size."""
    if made.dtype != promise.dtype:
        yield f"{name} is {promised} as {promise.dtype} and {is_} as {made.dtype}"
    if device and _where(made) != _where(promise):
        yield f"{name} is {promised} on device {promise.device} and {is_} on {made.device}"
    if made.dim() != promise.dim() or any(_differ(a, b) for a, b in zip(made.shape, promise.shape, strict=True)):
        yield f"{name} is {promised} with shape {_text(promise.shape)} and {is_} with {_text(made.shape)}"
    elif made.numel() and _strides_differ(made, promise):
        yield f"{name} is {promised} with strides {_text(promise.stride())} and {is_} with {_text(made.stride())}"


def _where(tensor: torch.Tensor) -> tuple[str, int]:
    return tensor.device.type, tensor.device.index or 0


def _differ(size: int, promise: int | torch.SymInt) -> bool:
    return isinstance(promise, int) and size != promise


def _strides_differ(made: torch.Tensor, promise: torch.Tensor) -> bool:
    """Strides of dimensions of size 1 are free."""
    pairs = zip(made.shape, made.stride(), promise.stride(), strict=True)
    return any(size != 1 and _differ(stride, other) for size, stride, other in pairs)


def _text(numbers: Iterable[object]) -> str:
    return f"({', '.join(str(number) for number in numbers)})"
