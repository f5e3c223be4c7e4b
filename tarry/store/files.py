"""The directory of stored programs: one file each, complete or not there, the least recently used thrown away first.

Any number of processes use it at once. A file is written under another name and renamed; a reader has what it has
opened, even if another process removes the name meanwhile. Locks are the system's, which frees them when their process
dies: one for removing files, and claims, so that one process compiles a program and the others wait for it.

Programs are code. A directory that is not this user's alone is refused (`tarry.trust`), and no link in it is followed.
"""

from __future__ import annotations

import fcntl
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

from tarry import events, trust
from tarry.store.blobs import CorruptError, pack, unpack
from tarry.store.identity import Identity

SUFFIX = ".program"
TEMPORARY = ".tmp-"
LOCK = ".lock"
CLAIM = ".claim"
CLAIM_POLL_SECONDS = 0.05
FOUND = "an earlier process has stored it"
STALE_SECONDS = 3600.0  # a temporary file or a claim that old has lost its writer


class Store:
    """Programs by identity, in a directory of at most `max_bytes`."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self._read_only = False
        self._refused = False
        self._looked_at = 0  # the inode of the directory whose files were looked at

    def get(self, identity: Identity, place: Mapping[str, Any] = MappingProxyType({})) -> bytes | None:
        """The program of that identity, if there is one. A damaged file is removed and counted. `place`: the line of
        the program that it is for, as fields of an event."""
        start = perf_counter()
        try:
            data = self._read(identity)
        except OSError as error:  # none, or none that we may read
            reason = self._why_missing(identity, error)
            events.emit("store_miss", key=identity.key, reason=reason, seconds=perf_counter() - start, **place)
            return None
        try:
            _, (text, program) = unpack(data)
            if text != identity.text.encode():
                raise CorruptError("it is a program for something else")
        except ValueError as error:
            self.reject(identity, str(error), place)
            reason = f"the stored program is damaged: {error}"
            events.emit("store_miss", key=identity.key, reason=reason, seconds=perf_counter() - start, **place)
            return None
        seconds = perf_counter() - start
        events.emit("store_hit", key=identity.key, bytes=len(data), reason=FOUND, seconds=seconds, **place)
        return bytes(program)

    def _why_missing(self, identity: Identity, error: OSError) -> str:
        """Why there is no program that can be read, in words: perhaps there are some that others have made of it."""
        if self._refused:
            return f"others can write to {self.directory}, so that nothing is read from there"
        if not isinstance(error, FileNotFoundError):
            return f"it cannot be read: {error}"
        found: list[list[str]] = []
        with suppress(OSError), self._open() as folder:
            for name in _newest(folder, f"{identity.family}-"):
                with suppress(OSError, ValueError), trust.open_file(self.directory / name, folder) as descriptor:
                    _, (text, _) = unpack(os.read(descriptor, os.fstat(descriptor).st_size))
                    differences = identity.differences(bytes(text).decode())
                    found += [] if differences is None else [differences]
        if not found:
            return "no program of this graph is stored"
        fewest = min(found, key=len)
        return f"programs of this graph are stored, but for {'; '.join(fewest)}"

    def has(self, identity: Identity) -> bool:
        """Whether there is something of that identity, by its name alone."""
        try:
            with self._open() as folder:
                os.stat(_name(identity), dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False
        return True

    def put(self, identity: Identity, program: bytes, place: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Keep a program. A failure is no error: tarry warns once and goes on."""
        data = pack({"format": 1}, (identity.text.encode(), program))
        if len(data) > self.max_bytes:
            reason = f"{len(data)} bytes, which is more than the store holds"
            events.emit("store_skip", key=identity.key, reason=reason, **place)
            return
        if self._read_only or self._refused:
            return
        try:
            trust.make_folder(self.directory)
            with self._open() as folder:
                trust.write_file(self.directory / _name(identity), data, folder, TEMPORARY)
                self._make_room(folder, place)
        except trust.UntrustedError:
            pass  # said already
        except OSError as error:
            self._read_only = True
            warnings.warn(
                f"tarry: compiled programs cannot be kept in {self.directory}: {error}. The next process compiles them "
                f"again. Set TARRY_CACHE_DIR to a directory that can be written, or TARRY_STORE=0.",
                stacklevel=2,
            )

    @contextmanager
    def claim(
        self, identity: Identity, timeout: float, place: Mapping[str, Any] = MappingProxyType({})
    ) -> Iterator[None]:
        """Make the program of that identity in the block, as the only process that does. Another one is waited for, as
        long as it lives and up to the time-out: look for its program in the block first. What cannot be locked is not
        claimed; a program is made twice then."""
        lock = self._lock_file(identity)
        if lock is None:
            yield
            return
        try:
            start = perf_counter()
            while not (locked := _locked(lock)) and perf_counter() - start < timeout:
                time.sleep(CLAIM_POLL_SECONDS)
            seconds = perf_counter() - start
            if not locked or seconds > CLAIM_POLL_SECONDS:
                reason = f"another process {'was' if locked else 'is still'} compiling it"
                events.emit("store_wait", key=identity.key, reason=reason, seconds=seconds, **place)
            try:
                yield
            finally:
                if locked:
                    with suppress(OSError), self._open() as folder:
                        os.unlink(f"{identity.key}{CLAIM}", dir_fd=folder)  # waiting processes have it open
                    with suppress(OSError):
                        fcntl.flock(lock, fcntl.LOCK_UN)  # a fork may have it open, too
        finally:
            os.close(lock)

    def _lock_file(self, identity: Identity) -> int | None:
        if self._read_only:
            return None
        try:
            trust.make_folder(self.directory)
            with self._open() as folder:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                return os.open(f"{identity.key}{CLAIM}", flags, 0o600, dir_fd=folder)
        except OSError:
            return None

    def reject(self, identity: Identity, reason: str, place: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Remove a program that turned out to be none."""
        events.emit("store_corrupt", key=identity.key, reason=reason, **place)
        with suppress(OSError), self._open() as folder:
            os.unlink(_name(identity), dir_fd=folder)

    @contextmanager
    def _open(self) -> Iterator[int]:
        """The directory, if it can be trusted. One that cannot is refused from then on, with a warning."""
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

    def _make_room(self, folder: int, place: Mapping[str, Any]) -> None:
        """Remove what was used longest ago until the rest fits. If another process is at it, that will do."""
        lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass
        else:
            self._remove_oldest(folder, place)
        finally:
            os.close(lock)

    def _remove_oldest(self, folder: int, place: Mapping[str, Any]) -> None:
        kept: list[tuple[float, int, str]] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):  # it may be gone
                    found = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(SUFFIX):
                        kept.append((found.st_mtime, found.st_size, entry.name))
                    elif _is_left_behind(entry.name, found.st_mtime):
                        os.unlink(entry.name, dir_fd=folder)
        total = sum(size for _, size, _ in kept)
        for _, size, name in sorted(kept):
            if total <= self.max_bytes:
                break
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            total -= size
            reason = f"all programs take more than {self.max_bytes} bytes, and this one was used longest ago"
            events.emit("store_evict", key=name.removesuffix(SUFFIX), bytes=size, reason=reason, **place)


def _locked(lock: int) -> bool:
    """Whether the lock of a file is ours now. Where a file system has no locks, it is."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_left_behind(name: str, written: float) -> bool:
    """Whether a file is of a process that has died before it could remove it."""
    return (name.startswith(TEMPORARY) or name.endswith(CLAIM)) and time.time() - written > STALE_SECONDS


def _newest(folder: int, prefix: str) -> list[str]:
    """Names of the newest few files that begin so."""
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if entry.name.startswith(prefix) and entry.name.endswith(SUFFIX)]
        found.sort(key=lambda entry: -entry.stat(follow_symlinks=False).st_mtime)
        return [entry.name for entry in found[:8]]


def _name(identity: Identity) -> str:
    return f"{identity.key}{SUFFIX}"
