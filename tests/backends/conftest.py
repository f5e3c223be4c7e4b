"""Backends that the tests of a module run on."""

from __future__ import annotations

import pytest

import tarry
from tests.support import load_device

NO_JAX = "the backend's extra is not installed: pip install 'tarry[xla]'"


@pytest.fixture
def torchscript() -> None:
    load_device()
    tarry.set_backend("torchscript")


@pytest.fixture
def xla() -> None:
    pytest.importorskip("jax", reason=NO_JAX)
    load_device()
    tarry.set_backend("xla")
