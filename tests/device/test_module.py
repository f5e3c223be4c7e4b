"""`torch.tarry`, `torch.accelerator` and the small print of being a device."""

from __future__ import annotations

import io

import pytest
import torch

from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


def test_it_is_the_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("tarry")
    assert torch.accelerator.is_available()
    assert torch.tarry.is_available()
    assert torch.tarry.is_initialized()
    assert torch.accelerator.device_count() == torch.tarry.device_count() == 1
    assert torch.get_device_module("tarry") is torch.tarry


def test_generated_methods() -> None:
    x = torch.ones(2).tarry()
    assert x.is_tarry
    assert x.device == torch.device("tarry:0")
    assert not torch.ones(2).is_tarry
    assert next(torch.nn.Linear(2, 2).tarry().parameters()).is_tarry


def test_current_device() -> None:
    assert torch.tarry.current_device() == torch.accelerator.current_device_index() == 0
    torch.tarry.set_device("tarry:0")
    for chosen in (0, "tarry", "tarry:0", torch.device("tarry", 0), None, -1):
        with torch.tarry.device(chosen):
            assert torch.tarry.current_device() == 0
    with torch.tarry.device_of(torch.ones(1)), torch.tarry.device_of(torch.ones(1, device="tarry")):
        assert torch.tarry.current_device() == 0
    torch.accelerator.set_device_index(0)


def test_storage_types_are_those_of_dtypes() -> None:
    assert torch.ones(1, device="tarry").storage_type() is torch.FloatStorage
    assert torch.ones(1, device="tarry", dtype=torch.int8).storage_type() is torch.CharStorage
    with pytest.raises(AttributeError, match="no attribute 'NoStorage'"):
        _ = torch.tarry.NoStorage


def test_no_such_device() -> None:
    with pytest.raises(ValueError, match="no device 'tarry:3'"):
        torch.tarry.set_device(3)
    with pytest.raises(RuntimeError, match="no device 'tarry:3'"):
        torch.accelerator.set_device_index(3)
    with pytest.raises(ValueError, match="expected a tarry device, got 'cpu'"):
        torch.tarry.set_device("cpu")
    with pytest.raises(RuntimeError, match="no device 'tarry:7'"):
        torch.Generator(device="tarry:7")


def test_number_of_devices_is_fixed_once_used() -> None:
    from tarry.native import C

    torch.ones(1, device="tarry").add(1).cpu()
    with pytest.raises(RuntimeError, match="cannot change from 1 to 2"):
        C.set_device_count(2)
    C.set_device_count(1)


def test_synchronize_computes_what_is_pending() -> None:
    from tarry.events import expect

    for synchronize in (
        torch.tarry.synchronize,
        torch.accelerator.synchronize,
        torch.tarry.current_stream().synchronize,
    ):
        x = torch.ones(3, device="tarry") + 1
        with expect(syncs=1):
            synchronize()
        with expect(syncs=0):
            assert x.sum().device.type == "tarry"


def test_properties_and_capability() -> None:
    assert torch.tarry.get_device_name() == torch.tarry.get_device_properties(0).name == "tarry"
    assert torch.tarry.get_device_capability() == (0, 0)
    assert torch.float32 in torch.accelerator.get_device_capability()["supported_dtypes"]


def test_engine_threads_run_on_the_device() -> None:
    seen: list[int] = []
    x = torch.ones(3, device="tarry", requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(torch.tarry.current_device()))
    y.sum().backward()
    assert seen == [0]
    assert torch.equal(x.grad.cpu(), torch.full((3,), 2.0))  # type: ignore[union-attr]


def test_save_and_load() -> None:
    file = io.BytesIO()
    x = torch.arange(6.0, device="tarry").reshape(2, 3)
    torch.save({"x": x, "again": x[0]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["x"].device == torch.device("tarry:0")
    assert torch.equal(loaded["x"].cpu(), torch.arange(6.0).reshape(2, 3))
    loaded["x"][0, 0] = 9
    assert loaded["again"][0].item() == 9
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].device.type == "cpu"
