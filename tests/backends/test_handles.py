"""Handles of data: made, assigned and filled by backends."""

from __future__ import annotations

import pytest
import torch

import tarry
from tarry.backends.base import Backend, Capabilities, Data
from tarry.errors import BackendError
from tarry.events import expect
from tarry.ir.layout import TensorType
from tarry.native import C
from tests.backends.simple import Walking, using
from tests.backends.simulated import Accelerator

USES_DEVICE = True


def test_handles() -> None:
    class Mine(Backend):
        name = "mine"
        capabilities = Capabilities(opaque_data=True)

    backend = Mine()
    pair, single = TensorType.contiguous(torch.float32, (2,)), TensorType.contiguous(torch.float32, (1,))
    a, b = backend.placeholder(pair), backend.placeholder(pair)
    assert isinstance(a, Data)
    assert not a.has_value
    assert a.handle != b.handle
    assert a.set("content") is a
    assert (a.value, a.has_value) == ("content", True)
    b.assign(a)
    assert (b.value, b.has_value, b.handle) == ("content", True, a.handle)
    with pytest.raises(BackendError, match=r"Data\.assign.*'mine'"):
        backend.placeholder(single).assign(a)
    with pytest.raises(BackendError, match=r"Data\.assign.*'mine'"):
        Mine().placeholder(pair).assign(a)


def test_a_backend_can_have_handles_of_its_own_kind() -> None:
    class Named(Data):
        pass

    class Mine(Accelerator):
        def placeholder(self, type_: TensorType) -> Data:
            made.append(Named(type_, self))
            return made[-1]

    made: list[Named] = []
    with using(Mine()):
        x = torch.ones(3).to("tarry") + 1
        assert x.tolist() == [2.0] * 3
    assert len(made) == 2
    assert all(isinstance(data, Named) for data in made)


def test_scalar_gives_data_for_a_number() -> None:
    backend = Accelerator()
    handle = backend.scalar(2.5, torch.float64)
    assert backend.memory[handle.address].item() == 2.5
    plain = Walking().scalar(3, torch.int32)
    assert (plain.item(), plain.dtype) == (3, torch.int32)


def test_a_stand_in_is_no_tensor_to_compute_with() -> None:
    with using(Accelerator()):
        x = torch.ones(3).to("tarry") + 1
        tarry.mark_step()
        with expect(syncs=0):
            assert C.materialise(x).tolist() == [2.0] * 3


def test_a_backend_with_memory_of_its_own_compiles_the_cells_of_an_lstm() -> None:
    """oneDNN's layers (csrc/device/lstm.cpp) would compute on the CPU."""
    torch.manual_seed(0)
    layer, x = torch.nn.LSTM(3, 4), torch.randn(5, 2, 3)
    expected = layer(x)[0]
    with using(Accelerator()):
        actual, _ = layer.to("tarry")(x.to("tarry"))
        assert "aten::sigmoid" in str(tarry.graph(actual))
        torch.testing.assert_close(actual.cpu(), expected)
