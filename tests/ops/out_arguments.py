"""``out=`` on the device against CPU eager: what an operator may do to the tensors that it is given to write to.

One call is made on both devices with the same ``out=`` arguments. They come in *forms*: of the right shape or not,
views, overlapping an input, of another dtype. Afterwards everything that a program can see must be the same: the error
at the call, the results, sizes, strides, offsets, the size of the storage, and what else lies in the storage.
``python -m tests.ops.survey_out`` runs all of OpInfo; ``test_out_arguments.py`` some of it.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves

from tests.ops.check import full_name
from tests.ops.nondeterministic import why_not_by_value
from tests.support.move import move


@dataclass(frozen=True)
class Like:
    """What a result looks like when eager makes it itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Out:
    """An ``out=`` argument and the tensor whose storage it lies in, whole."""

    tensor: torch.Tensor
    base: torch.Tensor


Form = Callable[[Like, list[torch.Tensor], str], Out | None]


def _base(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Contents that say where an element has come from, and that no operator gives by itself."""
    values = torch.arange(math.prod(shape)) % 113 + 11
    return values.to(dtype).reshape(shape).to(device)


def _right(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    base = _base(like.shape, like.dtype, device)
    return Out(base, base)


def _transposed(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    base = _base(like.shape[::-1], like.dtype, device)
    return Out(base.permute(*reversed(range(base.dim()))), base) if base.dim() > 1 else None


def _strided(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    base = _base(tuple(2 * n + 1 for n in like.shape), like.dtype, device)
    return Out(base[tuple(slice(1, None, 2) for _ in like.shape)], base) if like.shape else None


def _offset(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    base = _base((like.numel + 7,), like.dtype, device)
    return Out(base[3 : 3 + like.numel].view(like.shape), base)


def _empty(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    base = torch.empty(0, dtype=like.dtype, device=device)
    return Out(base, base)


def _too_small(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    base = _base((2,), like.dtype, device)
    return Out(base, base)


def _too_large(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    base = _base((like.numel + 5,), like.dtype, device)
    return Out(base, base)


def _view_too_small(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    """It grows inside its storage, over what other views see."""
    base = _base((like.numel + 7,), like.dtype, device)
    return Out(base[3:5], base)


def _view_that_grows(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    """It grows beyond its storage."""
    base = _base((6,), like.dtype, device)
    return Out(base[4:5], base)


def _same_numel(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    """As many elements in another shape: some kernels look at their number only."""
    base = _base((2, like.numel), like.dtype, device)
    return Out(base[:, 1 : 1 + like.numel // 2], base) if like.numel % 2 == 0 and like.numel else None


def _expanded(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    base = _base((1,), like.dtype, device)
    return Out(base.expand(like.shape), base) if like.numel > 1 else None


def _other_dtype(dtype: torch.dtype) -> Form:
    def form(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
        base = _base(like.shape, dtype, device)
        return Out(base, base) if like.dtype != dtype else None

    return form


def _empty_other_dtype(like: Like, _inputs: list[torch.Tensor], device: str) -> Out | None:
    base = torch.empty(0, dtype=torch.float64, device=device)
    return Out(base, base) if like.dtype != torch.float64 else None


def _is_input(like: Like, inputs: list[torch.Tensor], _device: str) -> Out | None:
    fitting = [t for t in inputs if t.dtype == like.dtype]
    return Out(fitting[0], fitting[0]) if fitting else None


def _is_last_input(like: Like, inputs: list[torch.Tensor], _device: str) -> Out | None:
    fitting = [t for t in inputs if t.dtype == like.dtype]
    return Out(fitting[-1], fitting[-1]) if len(fitting) > 1 else None


def _view_of_input(like: Like, inputs: list[torch.Tensor], _device: str) -> Out | None:
    """The right number of elements, inside an input where it is large enough."""
    for t in inputs:
        if t.dtype == like.dtype and t.numel() >= like.numel > 0 and t.is_contiguous():
            flat = t.view(-1)
            return Out(flat[flat.numel() - like.numel :].view(like.shape), t)
    return None


def _head_of_input(like: Like, inputs: list[torch.Tensor], _device: str) -> Out | None:
    """One element of an input, to be resized over the rest of it."""
    for t in inputs:
        if t.dtype == like.dtype and t.numel() > 1 and t.is_contiguous():
            return Out(t.view(-1)[:1], t)
    return None


FORMS: dict[str, Form] = {
    "right": _right,
    "transposed": _transposed,
    "strided": _strided,
    "offset": _offset,
    "empty": _empty,
    "too small": _too_small,
    "too large": _too_large,
    "view too small": _view_too_small,
    "view that grows": _view_that_grows,
    "same numel": _same_numel,
    "expanded": _expanded,
    "float64": _other_dtype(torch.float64),
    "int64": _other_dtype(torch.int64),
    "complex64": _other_dtype(torch.complex64),
    "bfloat16": _other_dtype(torch.bfloat16),
    "empty float64": _empty_other_dtype,
    "input": _is_input,
    "last input": _is_last_input,
    "view of input": _view_of_input,
    "head of input": _head_of_input,
}


def _outcome(call: Callable[[], Any]) -> tuple[type[BaseException] | None, str, bool]:
    """The type of the error at the call, its text, and whether PyTorch warned that it resized something."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
            error: tuple[type[BaseException] | None, str] = (None, "")
        except Exception as raised:
            error = (type(raised), " ".join(str(raised).split())[:160])
    return (*error, any("was resized" in str(w.message) for w in caught))


def _seen(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
    )


def _different_values(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(actual.detach().cpu(), expected.detach(), equal_nan=True)
    except AssertionError:
        return True
    return False


def compare(op: OpInfo, sample: Any, name: str, device: str) -> Iterator[str]:
    """What differs between ``device`` and the CPU for one sample and one form of ``out=``."""
    form = FORMS[name]
    inputs = (sample.input, sample.args, sample.kwargs)
    cpu = move(inputs, "cpu")
    try:
        shapes = op(cpu[0], *cpu[1], **cpu[2])
    except Exception:
        return
    results = [leaf for leaf in tree_leaves(shapes) if isinstance(leaf, torch.Tensor)]
    if not results or any(r.layout != torch.strided for r in results):
        return

    def prepare(on: str) -> tuple[Callable[[], Any], list[Out], list[torch.Tensor]] | None:
        moved = move(inputs, on)
        tensors = [t for t in tree_leaves(moved) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
        outs = [form(Like(tuple(r.shape), r.dtype), tensors, on) for r in results]
        if any(out is None for out in outs):
            return None
        found = [out for out in outs if out is not None]
        given: Any = found[0].tensor if isinstance(shapes, torch.Tensor) else tuple(out.tensor for out in found)
        x, args, kwargs = moved
        return lambda: op(x, *args, **{**kwargs, "out": given}), found, tensors

    wanted, got = prepare("cpu"), prepare(device)
    if wanted is None or got is None:
        return
    sizes = [out.base.untyped_storage().nbytes() for out in wanted[1]]
    torch.manual_seed(0)
    our_error, our_text, we_warned = _outcome(got[0])
    if name == "expanded" and our_error is RuntimeError and "single memory location" in our_text:
        return  # always an error here; some of eager's kernels write beyond such memory, or leave one element of many
    if "was resized before it was read" in our_text:
        return  # eager computes with whatever is there
    torch.manual_seed(0)
    error, text, warned = _outcome(wanted[0])
    if error is not our_error:
        says = f"{our_error.__name__}: {our_text}" if our_error else "no error"
        yield f"{says} instead of {error.__name__ + ': ' + text if error else 'no error'}"
        if error is None:
            return
    if warned != we_warned:
        yield "warns that it resizes" if we_warned else "does not warn that it resizes"
    by_value = why_not_by_value(full_name(op), sample) is None
    grown = [out.base.untyped_storage().nbytes() for out in wanted[1]] != sizes
    by_value = by_value and not (error and grown)  # what eager has grown and not written is arbitrary
    for kind, ours, theirs in (
        *((f"out {i}", a.tensor, b.tensor) for i, (a, b) in enumerate(zip(got[1], wanted[1], strict=True))),
        *((f"base {i}", a.base, b.base) for i, (a, b) in enumerate(zip(got[1], wanted[1], strict=True))),
        *((f"input {i}", a, b) for i, (a, b) in enumerate(zip(got[2], wanted[2], strict=True))),
    ):
        if _seen(ours) != _seen(theirs):
            yield f"{kind}: {_seen(ours)} instead of {_seen(theirs)}"
        if by_value:
            try:
                if _different_values(ours, theirs):
                    yield f"{kind}: other values"
            except Exception as late:
                yield f"{kind}: {type(late).__name__} when it is read: {' '.join(str(late).split())[:160]}"


def samples_of(op: OpInfo, dtype: torch.dtype, count: int) -> list[Any]:
    torch.manual_seed(0)
    found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 40))
    dense = [
        s
        for s in found
        if all(
            t.layout == torch.strided for t in tree_leaves((s.input, s.args, s.kwargs)) if isinstance(t, torch.Tensor)
        )
        and "out" not in s.kwargs
    ]
    if len(dense) <= count:
        return dense
    return [dense[round(i * (len(dense) - 1) / max(count - 1, 1))] for i in range(count)]


def check(
    op: OpInfo, dtype: torch.dtype, device: str, samples: int, forms: tuple[str, ...] = tuple(FORMS)
) -> list[str]:
    """Everything that differs, one line each."""
    found = []
    for number, sample in enumerate(samples_of(op, dtype, samples)):
        for name in forms:
            found += [f"{name}, sample {number}: {text}" for text in compare(op, sample, name, device)]
    return found
