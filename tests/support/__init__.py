"""What every test directory shares: which device is under test, and how to get tensors onto it.

The device comes from ``TARRY_TEST_DEVICE`` so that a harness can be checked against plain CPU first: with ``cpu`` every
comparison is of PyTorch with itself, and whatever fails there is a fault of the test.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

DEVICE: str = os.environ.get("TARRY_TEST_DEVICE", "tarry")

#: For tests of what only tarry has (counters, ``torch.tarry``, recording); with another device they mean nothing.
tarry_only = pytest.mark.skipif(DEVICE != "tarry", reason="tests what only the tarry device has")


def load_device(name: str = DEVICE, backend: str | None = None) -> None:
    """Make the device usable in this process; only tarry needs an import, and only when it is the one under test."""
    if name != "tarry":
        return
    import tarry
    from tarry.native import C

    if os.environ.get("TARRY_TEST_DIRECT") == "1":  # what can run at once does so: csrc/record/direct.h
        C.force_direct_calls(True)
    chosen = backend or os.environ.get("TARRY_TEST_BACKEND")
    if chosen is not None and tarry.get_backend().name != chosen:
        if chosen.startswith("ir-"):
            from tests.support.backends import register

            register()
        tarry.set_backend(chosen)


def reset_device(name: str = DEVICE) -> None:
    """Cut whatever a test left pending and zero the counters, so that one test's work is not counted in the next."""
    if name != "tarry":
        return
    import tarry

    tarry.mark_step(wait=True)
    tarry.metrics.reset()


def current_backend() -> Any:
    """The backend that a test finds."""
    if DEVICE != "tarry":
        return None
    import tarry

    return tarry.get_backend()


def restore_backend(backend: Any) -> None:
    """A test that chooses another backend chooses it for itself alone."""
    if DEVICE != "tarry":
        return
    import tarry

    if tarry.get_backend() is not backend:
        tarry.set_backend(backend)


@pytest.fixture(autouse=True)
def programs_for_small_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For the conftest.py of a folder whose tests are about programs: graphs get one however small they are."""
    if DEVICE != "tarry":
        yield
        return
    from tarry._api import _runtime
    from tarry.runtime import limits

    with monkeypatch.context() as patch:
        patch.setattr(limits, "SMALL_OPERATIONS", 0)
        _runtime.on_policy()
        yield
    _runtime.on_policy()


def counters(name: str = DEVICE) -> dict[str, float]:
    """The device's counters; empty for a device that has none."""
    if name != "tarry":
        return {}
    import tarry

    return dict(tarry.metrics.counters())


def fallbacks(name: str = DEVICE) -> dict[str, float]:
    """Operators that ran eagerly since the last reset, with their counts."""
    prefix = "fallback/"
    return {key.removeprefix(prefix): n for key, n in counters(name).items() if key.startswith(prefix)}


@contextlib.contextmanager
def expect(**counts: int) -> Iterator[Any]:
    """``tarry.events.expect`` on tarry; nothing on another device, where there is nothing to count."""
    if DEVICE != "tarry":
        yield None
        return
    from tarry.events import expect as tarry_expect

    with tarry_expect(**counts) as seen:
        yield seen


def step() -> None:
    """Cut the graph here, where the device records one."""
    if DEVICE == "tarry":
        import tarry

        tarry.mark_step()


def dev(value: Any) -> torch.Tensor:
    """A tensor on the device under test, from a CPU tensor or from Python data."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(DEVICE, copy=True)
    return torch.tensor(value, device=DEVICE)


def assert_same(actual: Any, expected: Any, *, exact: bool = False, what: str = "") -> None:
    """Same structure, dtype, shape and values; tensors that ought to be on the device are on it."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{what}: expected a tensor, got {type(actual).__name__}"
        assert actual.device.type == DEVICE, f"{what}: result is on {actual.device}, not on {DEVICE}"
        kwargs: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(actual.detach().cpu(), expected.detach(), equal_nan=True, **kwargs)
    elif isinstance(expected, dict):
        assert set(actual) == set(expected), f"{what}: keys {sorted(actual)} != {sorted(expected)}"
        for key, value in expected.items():
            assert_same(actual[key], value, exact=exact, what=f"{what}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{what}: length {len(actual)} != {len(expected)}"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, e, exact=exact, what=f"{what}[{i}]")
    else:
        assert actual == expected, f"{what}: {actual!r} != {expected!r}"


def _read(tree: Any) -> None:
    """Bring every tensor to the host: errors that depend on values are raised when they are read."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            leaf.cpu()


def both(fn: Any, *args: Any, exact: bool = False, **kwargs: Any) -> Any:
    """Run ``fn`` on CPU copies and on device copies of the tensors given, and require the same result.

    Either both raise (with the same exception class) or neither does; the device's result comes back.
    """
    from tests.support.move import move

    cpu_args, cpu_kwargs = move((args, kwargs), "cpu")
    dev_args, dev_kwargs = move((args, kwargs), DEVICE)
    try:
        expected = fn(*cpu_args, **cpu_kwargs)
    except Exception as error:
        with pytest.raises(type(error)):
            _read(fn(*dev_args, **dev_kwargs))
        return None
    actual = fn(*dev_args, **dev_kwargs)
    assert_same(actual, expected, exact=exact, what=getattr(fn, "__name__", "result"))
    assert_same((dev_args, dev_kwargs), (cpu_args, cpu_kwargs), exact=exact, what="argument after the call")
    return actual
