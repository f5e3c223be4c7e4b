"""What replays and guards keep alive, and what they let go of."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import tarry
from tests.replay.training import batches, replayed, sgd, trainer, warm
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


@pytest.mark.parametrize("backend", ["eager", "torchscript"])
def test_parameters_are_updated_in_place(backend: str) -> None:
    tarry.set_backend(backend)
    try:
        watched = trainer()
        step = replayed(watched)
        pointers = [tarry.native.C.materialise(p).data_ptr() for p in watched.model.parameters()]
        warm(step)
        assert [tarry.native.C.materialise(p).data_ptr() for p in watched.model.parameters()] == pointers
    finally:
        tarry.set_backend("eager")


def test_a_function_that_is_gone_frees_its_model() -> None:
    watched = trainer()
    watched.compiled = replayed(watched)  # type: ignore[attr-defined] # a cycle: only the garbage collector can tell
    parameter = weakref.ref(watched.model[0].weight)
    del watched
    gc.collect()
    assert parameter() is None


def test_old_results_and_gradients_are_freed() -> None:
    watched = trainer()
    step = replayed(watched)
    x, y = batches(1, device="tarry")[0]

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    step(x, y)
    before = tensors()
    for _ in range(20):
        step(x, y)
    assert tensors() <= before


def test_a_replaced_parameter_is_not_kept() -> None:
    watched = trainer()
    step = replayed(watched)
    old = weakref.ref(watched.model[0].weight)
    watched.model[0].weight = nn.Parameter(torch.zeros(8, 6, device="tarry"))
    watched.optimizer = sgd(watched.model)  # the step's own optimizer still has the old one in its groups
    x, y = batches(1, device="tarry")[0]
    step(x, y)
    assert old() is not None
    assert len(step._plans) == 1
