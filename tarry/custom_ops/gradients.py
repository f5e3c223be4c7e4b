"""Gradients against finite differences, and recorded on tarry against eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError, gradcheck

from tarry import pytree

_SMALL = 64
"""Elements up to which every entry of the Jacobian is compared; above it, products with random vectors."""


def check_gradients(
    location: str, copies: list[Any], given: list[Any], call: Callable[[Sequence[Any]], Any]
) -> Iterator[str]:
    """Compare the backward function with finite differences, in double precision if the kernel takes it.

    The arguments of the call that require a gradient are differentiated; if none does, all that can.
    """
    flat, structure = pytree.tree_flatten(copies)
    wanted = _wanted(pytree.tree_flatten(given)[0])
    if not wanted:
        return
    precise = [_as_double(leaf, k in wanted) for k, leaf in enumerate(flat)]
    try:
        with torch.no_grad():
            call(pytree.tree_unflatten([_plain(leaf) for leaf in precise], structure))
        tolerances = {"eps": 1e-6, "atol": 1e-5, "rtol": 1e-3}
    except Exception:  # it takes single precision only
        precise = [_plain(leaf).requires_grad_() if k in wanted else leaf for k, leaf in enumerate(flat)]
        tolerances = {"eps": 1e-3, "atol": 1e-2, "rtol": 1e-2}
    inputs = [precise[k] for k in wanted]

    def differentiated(*tensors: torch.Tensor) -> Any:
        leaves = list(precise)
        for k, tensor in zip(wanted, tensors, strict=True):
            leaves[k] = tensor
        results = call(pytree.tree_unflatten(leaves, structure))
        tensors = tuple(t for t in pytree.tree_leaves(results) if _has_gradient(t))
        if not tensors:
            raise RuntimeError("no result requires a gradient")
        return tensors

    small = sum(tensor.numel() for tensor in inputs) <= _SMALL
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Input #")  # single precision, where the kernel takes no other
            gradcheck(
                differentiated,
                inputs,
                fast_mode=not small,
                check_undefined_grad=False,
                nondet_tol=1e-7,
                **tolerances,  # type: ignore[arg-type]
            )
    except GradcheckError as error:
        lines = " ".join(str(error).split())
        yield f"the backward function at {location} disagrees with finite differences: {lines[:300]}"


def gradients(
    values: list[Any], given: list[Any], call: Callable[[Sequence[Any]], Any]
) -> list[tuple[str, torch.Tensor | None]]:
    """The gradients of the sum of all results, for the arguments of `values` that are differentiated in `given`."""
    wanted, results, inputs = _differentiable(values, given, call)
    if not results or not wanted:
        return []
    found = torch.autograd.grad(results, inputs, [torch.ones_like(t) for t in results], allow_unused=True)
    return [(f"tensor argument {k}", gradient) for k, gradient in zip(wanted, found, strict=True)]


def check_incoming(
    location: str, copies: list[Any], given: list[Any], call: Callable[[Sequence[Any]], Any]
) -> Iterator[str]:
    """A backward function must leave the gradients that it is given alone: others may hold them."""
    wanted, results, inputs = _differentiable(copies, given, call)
    if not results or not wanted:
        return
    incoming = [torch.ones_like(result) for result in results]
    versions = [gradient._version for gradient in incoming]
    torch.autograd.grad(results, inputs, incoming, allow_unused=True)
    for index, (gradient, version) in enumerate(zip(incoming, versions, strict=True)):
        if gradient._version != version or not torch.equal(gradient, torch.ones_like(gradient)):
            which = "the gradient" if len(incoming) == 1 else f"gradient {index}"
            yield f"the backward function at {location} writes to {which} that it is given. Copy it"


def _differentiable(
    values: list[Any], given: list[Any], call: Callable[[Sequence[Any]], Any]
) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
    """Which arguments are differentiated, the results of a call that have gradients, and these arguments."""
    flat, structure = pytree.tree_flatten(values)
    wanted = _wanted(pytree.tree_flatten(given)[0])
    leaves = [leaf.detach().requires_grad_() if k in wanted else leaf for k, leaf in enumerate(flat)]
    results = [t for t in pytree.tree_leaves(call(pytree.tree_unflatten(leaves, structure))) if _has_gradient(t)]
    return wanted, results, [leaves[k] for k in wanted]


def _has_gradient(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.requires_grad


def _wanted(flat: list[Any]) -> list[int]:
    floating = [k for k, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and _is_differentiable(leaf)]
    asked = [k for k in floating if flat[k].requires_grad]
    return asked or floating


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _plain(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _as_double(leaf: Any, requires_grad: bool) -> Any:
    if not isinstance(leaf, torch.Tensor) or not _is_differentiable(leaf):
        return leaf
    wide = torch.complex128 if leaf.is_complex() else torch.float64
    return leaf.detach().to(wide, copy=True).requires_grad_(requires_grad)
