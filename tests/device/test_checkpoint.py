"""Activation checkpointing: right gradients, right random numbers, and recomputation marked as such."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

both_kinds = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def current_region() -> int:
    from tarry.native import C

    region: int = C.set_region(0)
    C.set_region(region)
    return region


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 6, device="tarry").reshape(2, 3).requires_grad_()


@both_kinds
def test_regions_of_one_level(use_reentrant: bool) -> None:
    seen: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(current_region())
        return x.sin().cos()

    for _ in range(2):  # the same numbers in every step: they are part of what the graph is found by
        seen.clear()
        y = checkpoint(block, checkpoint(block, leaf(), use_reentrant=use_reentrant), use_reentrant=use_reentrant)
        y.sum().backward()
        assert seen == [0, 0, 1, 2]
        assert current_region() == 0


@pytest.mark.filterwarnings("ignore:None of the inputs")  # the inner reentrant checkpoint's forward runs without grad
@both_kinds
def test_nested_regions_are_told_apart(use_reentrant: bool) -> None:
    seen: list[tuple[str, int]] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(("inner", current_region()))
        return x.sin().cos()

    def outer(x: torch.Tensor) -> torch.Tensor:
        seen.append(("outer", current_region()))
        return checkpoint(inner, x.exp(), use_reentrant=use_reentrant).exp()

    for _ in range(2):
        seen.clear()
        checkpoint(outer, leaf(), use_reentrant=use_reentrant).sum().backward()
        assert seen == [("outer", 0), ("inner", 0), ("outer", 1), ("inner", 1), ("inner", 2)]
        assert current_region() == 0


@both_kinds
def test_region_ends_when_recomputation_fails(use_reentrant: bool) -> None:
    calls: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(current_region())
        if len(calls) > 1:
            raise ValueError("no second time")
        return x.sin()

    with pytest.raises(ValueError, match="no second time"):
        checkpoint(block, leaf(), use_reentrant=use_reentrant).sum().backward()
    assert calls == [0, 1]
    assert current_region() == 0


def gradients(run: Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3)
    torch.manual_seed(0)
    layer = layer.to("tarry")
    x = leaf()

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(layer(x).relu(), 0.5)

    y = run(block, run(block, x))
    y.sum().backward()
    tensors = [y, x.grad, layer.weight.grad, layer.bias.grad]
    return [t.detach().cpu() for t in tensors if t is not None]


@both_kinds
def test_same_gradients_and_same_dropout_as_without(use_reentrant: bool) -> None:
    expected = gradients(lambda block, x: block(x))
    actual = gradients(lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant))
    assert len(expected) == 4
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@both_kinds
def test_random_state_goes_on_after_recomputation(use_reentrant: bool) -> None:
    after: list[torch.Tensor] = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)):
        torch.manual_seed(0)
        run(lambda x: torch.nn.functional.dropout(x, 0.5) * 2, leaf()).sum().backward()
        after.append(torch.tarry.get_rng_state())
    assert torch.equal(after[0], after[1])


@both_kinds
def test_under_autocast(use_reentrant: bool) -> None:
    layer = torch.nn.Linear(3, 3).to("tarry")
    seen: list[torch.dtype] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        seen.append(y.dtype)
        return y.sin()

    with torch.autocast("tarry", dtype=torch.bfloat16):
        loss = checkpoint(block, leaf(), use_reentrant=use_reentrant).float().sum()
    loss.backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_missing_private_names_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.checkpoint as torch_checkpoint

    from tarry.device import checkpoint as ours

    monkeypatch.delattr(torch_checkpoint, "_recomputation_hook")
    monkeypatch.delattr(torch_checkpoint, "CheckpointFunction")
    ours.install()


def test_installing_twice_wraps_once() -> None:
    import torch.utils.checkpoint as torch_checkpoint

    from tarry.device import checkpoint as ours

    before = torch_checkpoint.CheckpointFunction.backward, torch_checkpoint._recomputation_hook
    ours.install()
    assert (torch_checkpoint.CheckpointFunction.backward, torch_checkpoint._recomputation_hook) == before


@both_kinds
def test_recomputation_is_not_merged_with_forward(use_reentrant: bool) -> None:
    import tarry

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.tanh().sin()

    def times_computed(y: torch.Tensor, x: torch.Tensor) -> int:
        y.sum().backward()
        assert x.grad is not None
        return tarry.explain(y, x.grad, stage="optimized").count("aten::tanh(")

    x = leaf()
    assert times_computed(block(x), x) == 1
    x = leaf()
    assert times_computed(checkpoint(block, x, use_reentrant=use_reentrant), x) == 2


@both_kinds
def test_every_step_finds_the_same_program(use_reentrant: bool) -> None:
    from tarry.events import expect

    layer = torch.nn.Linear(3, 3).to("tarry")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def block(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=use_reentrant)

    def step() -> None:
        optimizer.zero_grad()
        block(block(leaf())).sum().backward()
        optimizer.step()

    step()
    step()
    with expect(compiles=0, fallbacks=0):
        for _ in range(3):
            step()
