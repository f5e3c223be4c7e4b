"""Modules that tarry generates for itself, for the torch at hand. They are kept in the cache directory, like the native
part, and made when first asked for: a second or two, once for each version of torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import py_compile
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType

import tarry.trust as trust  # "from tarry" would load the whole package
from tarry.config import config


@functools.cache
def folder() -> Path | None:
    """Where the modules are; None if they cannot be written anywhere, or others could have written them."""
    from tarry.codegen.natives import torch_version

    digest = hashlib.sha256(f"{torch_version()} {sys.version_info[:2]}".encode())
    sources = Path(__file__).parent / "codegen"
    for path in sorted([*sources.rglob("*.py"), *sources.glob("*.yaml")]):
        digest.update(path.read_bytes())
    chosen = config.cache_dir / f"generated-{digest.hexdigest()[:16]}"
    try:
        if not chosen.is_dir():
            _make(chosen)
        with trust.open_folder(chosen):
            return chosen
    except trust.UntrustedError as error:
        warnings.warn(f"tarry: generated modules are not used: {error}", stacklevel=2)
    except OSError:
        pass
    return None


def _make(chosen: Path) -> None:
    """Make the whole folder at once: another process may be at it too."""
    from tarry.codegen.own import own_modules

    trust.make_folder(chosen.parent)
    temporary = Path(tempfile.mkdtemp(prefix=".generated-", dir=chosen.parent))
    try:
        for name, text in own_modules().items():
            (temporary / name).write_text(text, encoding="utf-8")
            if name.endswith(".py"):  # now, for every process to come: loading is ten times quicker
                py_compile.compile(
                    str(temporary / name),
                    dfile=str(chosen / name),
                    doraise=True,
                    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
                )
        os.rename(temporary, chosen)
    except OSError:
        if not chosen.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@functools.cache
def module(name: str) -> ModuleType | None:
    """A generated module by its name; None if there is none."""
    found = folder()
    path = None if found is None else found / f"{name}.py"
    if path is None or not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(f"tarry.generated.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@functools.cache
def class_names() -> dict[str, str]:
    """The operator of each class of nodes."""
    found = folder()
    return {} if found is None else dict(json.loads((found / "names.json").read_text(encoding="utf-8")))
