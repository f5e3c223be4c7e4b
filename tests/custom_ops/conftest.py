"""Operators of a test are taken back after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tarry.custom_ops.operator import global_registry


@pytest.fixture(autouse=True)
def _no_operators_left() -> Iterator[None]:
    yield
    for qualname in list(global_registry):
        if qualname.startswith("optest::"):
            global_registry[qualname].remove()
