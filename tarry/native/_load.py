"""Loads the built extension module into the process, building it first if need be."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import TextIO

from tarry.errors import NativeBuildError
from tarry.native._build import Extension, build


def load(extension: Extension, *, stream: TextIO | None = None) -> ModuleType:
    """The extension as a module, loaded at most once per process."""
    loaded = sys.modules.get(extension.full_name)
    if loaded is not None:
        return loaded
    import torch  # noqa: F401 - brings the libraries that the module links to into the process, so it needs no rpath

    path = build(extension, stream=stream)
    loader = importlib.machinery.ExtensionFileLoader(extension.full_name, str(path))
    spec = importlib.util.spec_from_file_location(extension.full_name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise NativeBuildError(
            f"tarry's native part was built as {path} but cannot be loaded: {error}. "
            f"Build it again with: python -m tarry.native --force"
        ) from error
    sys.modules[extension.full_name] = module
    return module
