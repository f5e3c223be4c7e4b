"""Folders whose contents are run as code: this user alone may write them.

Compiled programs, the native part and generated modules come out of the cache directory. Any user who can write there
runs code as this one. So folders are made with mode 0700, whatever the umask; one that another user owns or can write
is refused, with what to do about it, and so is one that holds another user's file. Checks are made on what was opened,
not on its name: nothing can be exchanged in between. Root counts as this user: it could do anything anyway.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not be waited for

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class UntrustedError(OSError):
    """What would be run as code is not this user's alone. The message says what to do."""


def make_folder(path: Path) -> None:
    """Make a folder that this user alone can enter, and those above it that are missing."""
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_folder(path.parent)
        make_folder(path)
    except FileExistsError:
        pass  # open_folder() will look at it


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """A descriptor of a folder that can be trusted. Raises OSError if there is none, UntrustedError if it cannot."""
    if path.is_symlink():  # for the message; O_NOFOLLOW decides
        raise UntrustedError(f"{path} is a link. {_remedy(path)}")
    descriptor = os.open(path, _FOLDER)
    try:
        check(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_file(path: Path, folder: int | None = None) -> Iterator[int]:
    """The same for a file; with `folder`, the one of that name in it."""
    descriptor = os.open(path.name if folder is not None else path, _FILE, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        check(found, path)
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedError(f"{path} is no plain file. {_remedy(path)}")
        yield descriptor
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, folder: int | None = None, prefix: str = ".tmp-") -> None:
    """Write a file that this user alone can read, whole or not at all; with `folder`, into that."""
    name = f"{prefix}{os.getpid()}-{secrets.token_hex(8)}"
    temporary, final = (name, path.name) if folder is not None else (path.with_name(name), path)
    handle = os.open(temporary, _NEW, 0o600, dir_fd=folder)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, final, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def is_trusted_file(path: Path) -> bool:
    """Whether there is a plain file that only this user can have written."""
    try:
        with open_file(path):
            return True
    except OSError:
        return False


def check(found: os.stat_result, path: Path) -> None:
    """Raise UntrustedError if another user owns a file or a folder, or can write it."""
    if found.st_uid not in (os.geteuid(), 0):
        raise UntrustedError(f"{path} belongs to another user (uid {found.st_uid}). {_remedy(path)}")
    if found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode):
        mode = stat.S_IMODE(found.st_mode)
        raise UntrustedError(
            f"{path} can be written by other users (mode {mode:04o}). {_remedy(path)} If you know that they have not "
            f"written there: chmod -R go-w {path}"
        )


def check_contents(folder: int, path: Path) -> None:
    """Raise UntrustedError if another user owns something in a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                owner = entry.stat(follow_symlinks=False).st_uid
            except FileNotFoundError:
                continue  # gone by now
            if owner not in (os.geteuid(), 0):
                raise UntrustedError(f"{path / entry.name} belongs to another user (uid {owner}). {_remedy(path)}")


def _remedy(path: Path) -> str:
    return f"Its contents would be run as code: remove {path}, or set TARRY_CACHE_DIR to a folder of your own."
