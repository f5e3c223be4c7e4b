"""Makes a wheel of tarry with the native part in it, built for the torch and the Python at hand.

The plain wheel is Python and C++ sources. This adds the library under `tarry/native/prebuilt`, in a folder named after
all that it was built from, so that `import tarry` loads it where these are the same and builds its own where they are
not.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from typing import TextIO

from tarry.errors import NativeBuildError
from tarry.native._build import Extension, Plan, build


def make_wheel(extension: Extension, project: Path, folder: Path, *, stream: TextIO | None = None) -> Path:
    """Write the wheel of the checkout `project` to `folder`, with the library of `extension` inside."""
    if not (project / "pyproject.toml").is_file():
        raise NativeBuildError(f"a wheel is made in a checkout of tarry, and {project} has no pyproject.toml")
    library = build(extension, stream=stream)
    with tempfile.TemporaryDirectory() as work:
        # A copy: setuptools leaves a folder `build` behind, and takes files that are no longer there from it.
        copy = Path(work) / "project"
        shutil.copytree(project / "tarry", copy / "tarry", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE", "tarry_autoload.py", "tarry_command.py"):
            shutil.copy(project / name, copy)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", work]
        done = subprocess.run([*command, str(copy)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NativeBuildError(f"pip could not make the wheel:\n{done.stderr.strip()}")
        (plain,) = Path(work).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return _with_library(plain, Plan(extension).packaged(), library.read_bytes(), folder)


def _tag() -> str:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"{python}-{python}-{platform}"


def _with_library(plain: Path, name: str, library: bytes, folder: Path) -> Path:
    """Copy a wheel with one more file, and with the tag of this platform."""
    stem, version = plain.name.split("-")[:2]
    made = folder / f"{stem}-{version}-{_tag()}.whl"
    record = f"{stem}-{version}.dist-info/RECORD"
    wheel = f"{stem}-{version}.dist-info/WHEEL"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        contents = {item.filename: source.read(item) for item in source.infolist() if item.filename != record}
        contents[name] = library
        lines = contents[wheel].decode().splitlines()
        kept = [line for line in lines if line and not line.startswith(("Tag:", "Root-Is-Purelib:"))]
        contents[wheel] = "\n".join([*kept, "Root-Is-Purelib: false", f"Tag: {_tag()}", ""]).encode()
        rows = []
        for path, data in contents.items():
            target.writestr(path, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={digest},{len(data)}")
        target.writestr(record, "\n".join([*rows, f"{record},,", ""]))
    return made
