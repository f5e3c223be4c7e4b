"""Puts the checkout on the import path, and leaves out tests that need a GPU where there is none."""

from __future__ import annotations

import os

import pytest

# Tests that name no backend test the recorder and the runtime, on the reference path.
os.environ.setdefault("TARRY_BACKEND", "eager")
# Tests count compiles: they happen at once, and a program of an earlier run is no help. Tests of other policies and of
# stored programs say so.
os.environ.setdefault("TARRY_COMPILE", "wait")
os.environ.setdefault("TARRY_STORE", "0")
# `import torch` does not import tarry: tests of single parts load no device. Tests of that switch it on.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not needs_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if item not in needs_gpu]
