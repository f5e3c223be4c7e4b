"""Backends are found by name, by instance and by registration; a wrong name says which there are."""

from __future__ import annotations

import pytest
import torch

import tarry
from tarry.backends.eager import EagerBackend
from tarry.errors import BackendError
from tarry.events import expect

USES_DEVICE = True


@pytest.fixture(autouse=True)
def _back_to_eager():
    yield
    tarry.set_backend("eager")


def test_by_name_and_by_instance() -> None:
    tarry.set_backend("null")
    assert tarry.get_backend().name == "null"
    mine = EagerBackend()
    tarry.set_backend(mine)
    assert tarry.get_backend() is mine


def test_a_registered_factory() -> None:
    class Mine(EagerBackend):
        name = "mine"

    tarry.register_backend("mine", Mine)
    tarry.set_backend("mine", device="cpu")
    assert isinstance(tarry.get_backend(), Mine)
    assert (torch.ones(2, device="tarry") + 1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("eagre", "Did you mean 'eager'"), (3, "takes a name, a tarry.Backend"), (EagerBackend, "takes a name, a")],
)
def test_a_wrong_backend_is_refused_and_the_old_one_stays(wrong, message) -> None:
    before = tarry.get_backend()
    with pytest.raises(BackendError, match=message):
        tarry.set_backend(wrong)
    assert tarry.get_backend() is before


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(BackendError, match="no CUDA device"):
        tarry.set_backend("eager", device="cuda")


def test_register_wants_a_name_and_a_factory() -> None:
    with pytest.raises(BackendError, match="is not a name"):
        tarry.register_backend("no good", EagerBackend)
    with pytest.raises(BackendError, match="Backend class or a factory"):
        tarry.register_backend("good", 3)  # type: ignore[arg-type]


def test_switching_keeps_pending_and_computed_values() -> None:
    x = torch.ones(2, device="tarry") + 1
    y = x * 2
    tarry.set_backend(EagerBackend())
    assert y.tolist() == [4.0, 4.0]
    assert (x + y).tolist() == [6.0, 6.0]


def test_the_null_backend_compiles_everything_and_computes_nothing() -> None:
    tarry.set_backend("null")
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.GELU()).to("tarry")
    optimizer = torch.optim.AdamW(net.parameters())
    with expect(compiles=2, fallbacks=0, syncs=5):
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(2, 3).to("tarry")).sum().backward()
            optimizer.step()
    assert net[0].weight.cpu().abs().sum() == 0


def test_an_abstract_backend_says_what_is_missing() -> None:
    tarry.set_backend(tarry.Backend())
    with pytest.raises(NotImplementedError, match="does not define compile"):
        (torch.ones(2, device="tarry") + 1).cpu()
