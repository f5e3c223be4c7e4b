"""The directory of stored programs: one file each, complete or not there, the least recently used thrown away first.

Any number of processes use it at once. A file is written under another name and renamed; a reader has what it has
opened, whoever removes the name meanwhile. The only lock is that of the one who throws files away.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

from tarry import events
from tarry.store.blobs import CorruptError, pack, unpack
from tarry.store.identity import Identity

SUFFIX = ".program"
TEMPORARY = ".tmp-"
STALE_SECONDS = 3600.0  # a temporary file that old has lost its writer


class Store:
    """Programs by identity, in a directory of at most `max_bytes`."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self._read_only = False

    def get(self, identity: Identity) -> bytes | None:
        """The program of that identity, if there is one. A damaged file is removed and counted."""
        path = self._path(identity)
        try:
            data = path.read_bytes()
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
        with suppress(OSError):
            os.utime(path)  # it was used just now
        events.emit("store_hit", key=identity.key, bytes=len(data))
        return bytes(program)

    def has(self, identity: Identity) -> bool:
        """Whether there is something of that identity, by its name alone."""
        return self._path(identity).exists()

    def put(self, identity: Identity, program: bytes) -> None:
        """Keep a program. Failing to is no error: it is said once, and the program goes on."""
        data = pack({"format": 1}, (identity.text.encode(), program))
        if len(data) > self.max_bytes:
            events.emit("store_skip", key=identity.key, reason=f"{len(data)} bytes, which is more than the store holds")
            return
        if self._read_only:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._write(self._path(identity), data)
            self._make_room()
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
        with suppress(OSError):
            self._path(identity).unlink()

    def _path(self, identity: Identity) -> Path:
        return self.directory / f"{identity.key}{SUFFIX}"

    def _write(self, path: Path, data: bytes) -> None:
        handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=self.directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _make_room(self) -> None:
        """Remove what was used longest ago until the rest fits. If another process is at it, that will do."""
        with open(self.directory / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
            kept: list[tuple[float, int, Path]] = []
            for entry in os.scandir(self.directory):
                with suppress(OSError):  # it may be gone
                    found = entry.stat()
                    if entry.name.endswith(SUFFIX):
                        kept.append((found.st_mtime, found.st_size, Path(entry.path)))
                    elif entry.name.startswith(TEMPORARY) and time.time() - found.st_mtime > STALE_SECONDS:
                        os.unlink(entry.path)
            total = sum(size for _, size, _ in kept)
            for _, size, path in sorted(kept):
                if total <= self.max_bytes:
                    break
                path.unlink(missing_ok=True)
                total -= size
                events.emit("store_evict", key=path.stem, bytes=size)

