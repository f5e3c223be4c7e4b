"""A wheel with the built native part: it installs like any other, and nothing is compiled when it is imported."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tarry.errors import NativeBuildError
from tarry.native import _build, _wheel
from tarry.native._build import TARRY, Extension, Plan, build
from tests.native.support import tiny

ROOT = Path(__file__).parent.parent.parent


def test_a_library_in_the_package_is_found_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TARRY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_build, "_ROOT", tmp_path / "site")
    extension = tiny(tmp_path)
    packaged = tmp_path / "site" / Plan(extension).packaged()
    assert Plan(extension).find() is None
    packaged.parent.mkdir(parents=True)
    packaged.write_bytes(b"library")
    assert build(extension) == packaged
    (extension.sources / "answer.h").write_text("#pragma once\nlong answer(); // changed\n")
    assert Plan(extension).find() is None, "a library of other sources must not be loaded"


def test_a_wheel_needs_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match=r"has no pyproject\.toml"):
        _wheel.make_wheel(Extension("x._x", tmp_path), tmp_path, tmp_path)


@pytest.mark.slow
def test_an_installed_wheel_does_not_compile(tmp_path: Path) -> None:
    wheel = _wheel.make_wheel(TARRY, ROOT, tmp_path / "wheels")
    assert wheel.name.endswith(f"{_wheel._tag()}.whl")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    with zipfile.ZipFile(wheel) as contents:
        assert Plan(TARRY).packaged() in contents.namelist()
    program = (
        "import torch, tarry; from tarry.native import C; "
        "print((torch.ones(2, device='tarry') + 1).sum().item(), C.__file__)"
    )
    # Without a compiler on the path, and with an empty cache.
    environment = {"PATH": "/nowhere", "PYTHONPATH": str(site), "HOME": str(tmp_path), "TARRY_BACKEND": "eager"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    value, path = done.stdout.split()
    assert value == "4.0"
    assert Path(path).is_relative_to(site)
    assert not list(tmp_path.glob(".cache/tarry/objects/*"))
