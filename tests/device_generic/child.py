"""What a child process does: it loads the test classes of one file for one device, and runs a test at a time."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import unittest

from tests.support.pool import Retire

SUFFIXES = {
    "tarry": ("PRIVATEUSE1", "TARRY"),
    "cpu": ("CPU",),
}  # of classes; torch.testing learns the device's name late

_classes: dict[str, type[unittest.TestCase]] = {}


def setup(folder: str, file: str, device: str, backend: str) -> None:
    """In the child: the test classes of one file, for one device."""
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "privateuse1" if device == "tarry" else device
    sys.argv = [file]
    sys.path.insert(0, folder)
    import torch

    torch.set_num_threads(1)
    import tarry

    tarry.set_backend(backend)
    module = importlib.import_module(file)
    for name, value in vars(module).items():
        for suffix in SUFFIXES[device]:
            if isinstance(value, type) and issubclass(value, unittest.TestCase) and name.endswith(suffix):
                _classes[name.removesuffix(suffix)] = value


def names(_: str) -> list[str]:
    load = unittest.TestLoader().getTestCaseNames
    return [f"{name}.{test}" for name, cls in _classes.items() for test in load(cls)]


def work(task: str) -> tuple[str, str]:
    """(passed, failed, skipped or absent; the text of the error)."""
    name, test = task.split(".")
    if name not in _classes or not hasattr(_classes[name], test):
        return "absent", ""
    result = unittest.TestResult()
    unittest.TestSuite([_classes[name](test)]).run(result)
    failures = result.errors + result.failures
    if failures:
        answer = "failed", failures[0][1]
    elif result.unexpectedSuccesses:
        answer = "failed", "Unexpected success"
    else:
        answer = ("skipped" if result.skipped else "passed"), ""
    del result, failures
    gc.collect()
    try:
        import tarry

        tarry.mark_step(wait=True)
    except Exception as error:  # what is left pending must not be seen by the next test
        answer = (answer[0], answer[1] or f"left pending: {type(error).__name__}: {error}")
        raise Retire(answer) from None
    return answer
