"""`torch.use_deterministic_algorithms`: the switch counts where an operator is called, not where it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


@contextmanager
def _deterministic(*, warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


FRESH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda z: torch.empty(4, 3, device=z.device),
    "empty_like": torch.empty_like,
    "empty_strided": lambda z: torch.empty_strided((4, 3), (1, 5), device=z.device),
    "new_empty": lambda z: z.new_empty(5),
    "out": lambda z: torch.empty(4, 3, out=torch.zeros(1, device=z.device)),
    "resize": lambda z: torch.empty(0, device=z.device).resize_(6),
}


@pytest.mark.parametrize("name", FRESH)
def test_fresh_memory_is_filled(name: str) -> None:
    z = torch.zeros(4, 3, device="tarry")
    with _deterministic():
        made = FRESH[name](z)
    assert made.isnan().all().item()


def test_integers_are_filled_with_the_greatest() -> None:
    with _deterministic():
        made = torch.empty(3, dtype=torch.int32, device="tarry")
    assert made.tolist() == [torch.iinfo(torch.int32).max] * 3


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "topk": lambda t: torch.topk(t, 3).indices,
    "index_add": lambda t: t.clone().index_add_(1, torch.tensor([0, 0, 1]).to(t.device), t[:, :3]),
    "index_put": lambda t: t.clone().index_put_((torch.tensor([0, 0]).to(t.device),), t[1], accumulate=True),
    "scatter": lambda t: t.clone().scatter_add_(0, torch.zeros_like(t, dtype=torch.long), t),
    "cumsum": lambda t: t.cumsum(1),
    "sort": lambda t: t.sort(dim=1, stable=True).indices,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_as_on_the_cpu(name: str) -> None:
    x = torch.tensor([[3.0, 3.0, 2.0, 3.0, 1.0], [1.0, 0.0, 0.0, 0.0, 2.0]])
    with _deterministic():
        want, pending = OPERATORS[name](x), OPERATORS[name](x.to("tarry"))
    assert torch.equal(pending.cpu(), want)  # computed when the switch is off again


def test_the_switch_is_that_of_the_call() -> None:
    x = torch.ones(3).to("tarry")
    plain = x + 1
    with _deterministic():
        strict = torch.empty(3, device="tarry")
        assert (plain + 1).tolist() == [3.0] * 3
    assert strict.isnan().all().item()
    assert not torch.are_deterministic_algorithms_enabled()
