"""What is done to a framework when it is imported: once, in whatever order, and to a version that does not fit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tarry.integrations import huggingface
from tarry.integrations.after_import import after_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose module `half` sets something up while it is being imported, as `import torch` loads tarry."""
    folder = tmp_path / "a_framework"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "late.py").write_text("")
    (folder / "half.py").write_text("import a_framework\na_framework.begin()\nimport a_framework.late\nvalue = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "a_framework"
    for name in [name for name in sys.modules if name.startswith("a_framework")]:
        del sys.modules[name]


def test_after_a_later_import_and_only_once(package: str) -> None:
    seen: list[ModuleType] = []
    after_import(f"{package}.late", seen.append)
    assert importlib.util.find_spec(f"{package}.late") is not None  # a look for it is no import
    assert seen == []
    late = importlib.import_module(f"{package}.late")
    importlib.import_module(f"{package}.late")
    assert seen == [late]


def test_at_once_if_it_is_imported(package: str) -> None:
    late = importlib.import_module(f"{package}.late")
    seen: list[ModuleType] = []
    after_import(f"{package}.late", seen.append)
    assert seen == [late]


def test_a_module_in_the_middle_of_its_import_is_finished_first(package: str) -> None:
    values: list[int] = []
    framework = importlib.import_module(package)
    framework.begin = lambda: after_import(f"{package}.half", lambda module: values.append(module.value))
    importlib.import_module(f"{package}.half")
    importlib.util.find_spec("a_module_that_nobody_has")  # the next import of anything
    assert values == [1]


def test_a_version_that_does_not_fit_is_a_warning() -> None:
    module = ModuleType("accelerate.state")
    module.PartialState = type("PartialState", (), {"__module__": "accelerate.state"})
    with pytest.warns(UserWarning, match=r"this version of accelerate.state, which has no default_device"):
        huggingface._open_state(module)
