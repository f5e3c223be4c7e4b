"""Writing files: all or none of them, each replaced at once, and only if it changed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def stale(files: Mapping[Path, str]) -> list[Path]:
    """Those files that are not there or say something else."""
    found = []
    for path, text in files.items():
        try:
            same = path.read_text(encoding="utf-8") == text
        except (OSError, UnicodeDecodeError):
            same = False
        if not same:
            found.append(path)
    return found


def write(files: Mapping[Path, str]) -> list[Path]:
    """Write what changed; returns those files. All are on disk, beside their places, before the first is replaced."""
    changed = stale(files)
    prepared: list[tuple[str, Path]] = []
    try:
        for path in changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
            prepared.append((temporary, path))
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(files[path])
            os.chmod(temporary, _mode(path))
        while prepared:
            os.replace(*prepared[0])
            prepared.pop(0)
    finally:
        for temporary, _ in prepared:
            Path(temporary).unlink(missing_ok=True)
    return changed


def _mode(path: Path) -> int:
    """The permissions that a file had, or that a new one gets: mkstemp gives it to its owner alone."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
