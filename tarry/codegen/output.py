"""Writing files: all or none of them, each replaced at once, and only if it changed."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tarry.codegen.model import Position, Problem

# The command in the first lines of a generated file: a comment of Python, of Markdown, or a value of JSON.
_COMMAND = re.compile(r'(# Generated\. .*\n)(?:#   .*\n)+|(<!-- Generated\. .*\n).*\n|"generated_by": .*\n')


def stale(files: Mapping[Path, str], *, whatever_command: bool = False) -> list[Path]:
    """Those files that are not there or say something else. `whatever_command`: the command that is in a file may
    differ, as it does where paths are given relative to another directory."""
    found = []
    for path, text in files.items():
        try:
            present = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            found.append(path)
            continue
        if present != text and not (whatever_command and _without_command(present) == _without_command(text)):
            found.append(path)
    return found


def _without_command(text: str) -> str:
    return _COMMAND.sub(r"\1\2", text, count=1)


def is_generated(path: Path) -> bool:
    """Whether a file says of itself that it was generated."""
    first = path.read_text(encoding="utf-8", errors="replace")[:200]
    return "Generated. Do not edit" in first or '"generated_by"' in first


def obstacles(paths: Iterable[Path], inputs: Iterable[Path]) -> list[Problem]:
    """What is in the way of writing some files: whatever an author wrote is not replaced."""
    read = {path.resolve() for path in inputs}
    found = []
    for path in paths:
        position = Position(str(path))
        if path.resolve() in read:
            message = "this file was given to be read, and would be replaced by a generated one"
            found.append(Problem(position, message, "Give it another name, or choose another --output-dir."))
        elif path.is_dir():
            found.append(Problem(position, "this is a directory, where a file is to be written", "Remove it."))
        elif path.is_file() and path.stat().st_size and not is_generated(path):
            message = "this file was not generated, and would be replaced by a generated one"
            hint = "Move it, or choose another --output-dir. A generated file begins with `Generated. Do not edit`."
            found.append(Problem(position, message, hint))
    return found


def write(files: Mapping[Path, str]) -> list[Path]:
    """Write what changed; returns those files. All are on disk, beside their places, before the first is replaced."""
    changed = stale(files)
    prepared: list[tuple[str, Path]] = []
    try:
        for path in changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _blaming(path):
                handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
                prepared.append((temporary, path))
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    stream.write(files[path])
                os.chmod(temporary, _mode(path))
        while prepared:
            with _blaming(prepared[0][1]):
                os.replace(*prepared[0])
            prepared.pop(0)
    finally:
        for temporary, _ in prepared:
            Path(temporary).unlink(missing_ok=True)
    return changed


@contextlib.contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """An error names the file that was to be written, not the temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _mode(path: Path) -> int:
    """The permissions that a file had, or that a new one gets: mkstemp gives it to its owner alone."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
