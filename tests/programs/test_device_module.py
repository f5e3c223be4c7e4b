"""``torch.tarry``: what scripts written for ``torch.cuda`` look for on a device's module."""

from __future__ import annotations

import pytest
import torch

from tests.support import DEVICE, assert_same, tarry_only

USES_DEVICE = True
pytestmark = tarry_only


def test_presence() -> None:
    assert torch.tarry.is_available() is True
    assert torch.tarry.device_count() >= 1
    assert torch.tarry.current_device() == 0
    assert torch.get_device_module("tarry") is torch.tarry


def test_synchronize_computes_what_is_pending() -> None:
    x = torch.ones(3, device=DEVICE) + 1
    torch.tarry.synchronize()
    assert_same(x, torch.full((3,), 2.0))


def test_device_context_and_set_device() -> None:
    with torch.tarry.device(0):
        x = torch.ones(1, device="tarry")
    assert x.device == torch.device("tarry:0")
    torch.tarry.set_device(0)
    with pytest.raises((RuntimeError, ValueError)):
        torch.ones(1, device="tarry:99")


def test_accelerator_api() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "tarry"
    assert torch.accelerator.device_count() == torch.tarry.device_count()
    torch.accelerator.synchronize()


def test_tensor_and_module_methods() -> None:
    assert torch.ones(2).tarry().device.type == "tarry"
    assert torch.ones(2, device="tarry").is_tarry
    assert not torch.ones(2).is_tarry
    assert next(torch.nn.Linear(2, 2).tarry().parameters()).device.type == "tarry"


def test_streams_and_events_are_harmless() -> None:
    stream = torch.tarry.current_stream()
    stream.synchronize()
    event = torch.Event("tarry")
    event.record()
    event.synchronize()
