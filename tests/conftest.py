"""One device, one thread, one seed, and no counts left over from the test before."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import DEVICE, current_backend, load_device, reset_device, restore_backend

# Recording the first example of a new graph is slower than the rest, so hypothesis must not judge by time.
# The same examples in every run, so that a run of CI fails for what was changed; TARRY_EXPLORE=1 tries others.
settings.register_profile(
    "tarry",
    derandomize=os.environ.get("TARRY_EXPLORE") != "1",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("tarry")


def pytest_report_header() -> str:
    return f"device under test: {DEVICE} (TARRY_TEST_DEVICE)"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """More threads only make the tests fight for the cores."""
    torch.set_num_threads(1)


@pytest.fixture
def device() -> str:
    """The device under test, loaded."""
    load_device()
    return DEVICE


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed the generators; drop what a test recorded, counted and chose. Tests that need no device do not load one."""
    torch.manual_seed(0)
    touches_device = "device" in request.fixturenames or getattr(request.module, "USES_DEVICE", False)
    if not touches_device:
        yield
        return
    load_device()
    reset_device()
    backend = current_backend()
    yield
    reset_device()
    restore_backend(backend)
