"""The directory of stored programs: one file each, complete or not there, the least recently used thrown away first.

Any number of processes use it at once. A file is written under another name and renamed; a reader has what it has
opened, even if another process removes the name meanwhile. The only lock is for removing files.

Programs are code. A directory that is not this user's alone is refused (`tarry.trust`), and no link in it is followed.
"""

from __future__ import annotations

import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tarry import events, trust
from tarry.store.blobs import CorruptError, pack, unpack
from tarry.store.identity import Identity

SUFFIX = ".program"
TEMPORARY = ".tmp-"
LOCK = ".lock"
STALE_SECONDS = 3600.0  # a temporary file that old has lost its writer


class Store:
    """Programs by identity, in a directory of at most `max_bytes`."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self._read_only = False
        self._refused = False
        self._looked_at = 0  # the inode of the directory whose files were looked at

    def get(self, identity: Identity) -> bytes | None:
        """The program of that identity, if there is one. A damaged file is removed and counted."""
        try:
            data = self._read(identity)
        except OSError:  # none, or none that we may read
            events.emit("store_miss", key=identity.key)
            return None
        try:
            _, (text, program) = unpack(data)
            if text != identity.text.encode():
                raise CorruptError("it is a program for something else")
        except ValueError as error:
            self.reject(identity, str(error))
            events.emit("store_miss", key=identity.key)
            return None
        events.emit("store_hit", key=identity.key, bytes=len(data))
        return bytes(program)

    def has(self, identity: Identity) -> bool:
        """Whether there is something of that identity, by its name alone."""
        try:
            with self._open() as folder:
                os.stat(_name(identity), dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False
        return True

    def put(self, identity: Identity, program: bytes) -> None:
        """Keep a program. A failure is no error: tarry warns once and goes on."""
        data = pack({"format": 1}, (identity.text.encode(), program))
        if len(data) > self.max_bytes:
            events.emit("store_skip", key=identity.key, reason=f"{len(data)} bytes, which is more than the store holds")
            return
        if self._read_only or self._refused:
            return
        try:
            trust.make_folder(self.directory)
            with self._open() as folder:
                trust.write_file(self.directory / _name(identity), data, folder, TEMPORARY)
                self._make_room(folder)
        except trust.UntrustedError:
            pass  # said already
        except OSError as error:
            self._read_only = True
            warnings.warn(
                f"tarry: compiled programs cannot be kept in {self.directory}: {error}. The next process compiles them "
                f"again. Set TARRY_CACHE_DIR to a directory that can be written, or TARRY_STORE=0.",
                stacklevel=2,
            )

    def reject(self, identity: Identity, reason: str) -> None:
        """Remove a program that turned out to be none."""
        events.emit("store_corrupt", key=identity.key, reason=reason)
        with suppress(OSError), self._open() as folder:
            os.unlink(_name(identity), dir_fd=folder)

    @contextmanager
    def _open(self) -> Iterator[int]:
        """The directory, if it can be trusted. One that cannot is refused for good, and a warning says why."""
        if self._refused:
            raise trust.UntrustedError("refused before")
        try:
            with trust.open_folder(self.directory) as folder:
                inode = os.fstat(folder).st_ino
                if inode != self._looked_at:
                    trust.check_contents(folder, self.directory)
                    self._looked_at = inode
                yield folder
        except trust.UntrustedError as error:
            self._refused = True
            warnings.warn(
                f"tarry: compiled programs are neither read nor kept: {error} TARRY_STORE=0 does without them.",
                stacklevel=2,
            )
            raise

    def _read(self, identity: Identity) -> bytes:
        name = _name(identity)
        with self._open() as folder, trust.open_file(self.directory / name, folder) as descriptor:
            with suppress(OSError):
                os.utime(descriptor)  # it was used just now
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()

    def _make_room(self, folder: int) -> None:
        """Remove what was used longest ago until the rest fits. If another process is at it, that will do."""
        lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass
        else:
            self._remove_oldest(folder)
        finally:
            os.close(lock)

    def _remove_oldest(self, folder: int) -> None:
        kept: list[tuple[float, int, str]] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):  # it may be gone
                    found = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(SUFFIX):
                        kept.append((found.st_mtime, found.st_size, entry.name))
                    elif entry.name.startswith(TEMPORARY) and time.time() - found.st_mtime > STALE_SECONDS:
                        os.unlink(entry.name, dir_fd=folder)
        total = sum(size for _, size, _ in kept)
        for _, size, name in sorted(kept):
            if total <= self.max_bytes:
                break
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            total -= size
            events.emit("store_evict", key=name.removesuffix(SUFFIX), bytes=size)


def _name(identity: Identity) -> str:
    return f"{identity.key}{SUFFIX}"
