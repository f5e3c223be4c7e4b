"""timm without torchvision, whose builds import only beside the build of torch that they were made for.

timm's data loading needs it, its models do not: they import it all the same. Where the real one cannot be imported,
names of it are empty classes. scripts/environment.sh installs timm in a folder of its own: transformers imports timm
where it finds it, and fails with it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = str(Path(sys.prefix) / "timm")


class _AnyName(type):
    """A class that has whatever attribute it is asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _AnyName(name, (), {})
        setattr(cls, name, value)
        return value


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        names = _AnyName(spec.name, (), {})
        module.__dict__["__getattr__"] = lambda name: getattr(names, name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Have `import timm` find the folder, and `import torchvision` give the stub, unless it works as it is."""
    sys.path.append(_FOLDER)
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Finder())


def remove() -> None:
    """Take both away, so that other packages do not find them."""
    sys.path.remove(_FOLDER)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
