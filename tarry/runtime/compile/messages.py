"""Messages over a pipe, each with its length."""

from __future__ import annotations

from typing import Protocol


class Pipe(Protocol):
    """An end of a pipe, opened for bytes."""

    def read(self, count: int, /) -> bytes | None: ...
    def write(self, data: bytes | memoryview, /) -> int | None: ...
    def flush(self) -> None: ...


def send(pipe: Pipe, message: bytes) -> None:
    """Write a message."""
    data = memoryview(len(message).to_bytes(8, "little") + message)
    while data:
        data = data[pipe.write(data) or 0 :]  # a pipe without a buffer takes what fits
    pipe.flush()


def receive(pipe: Pipe) -> bytes | None:
    """Read a message; None at the end."""
    length = _read(pipe, 8)
    return None if length is None else _read(pipe, int.from_bytes(length, "little"))


def _read(pipe: Pipe, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = pipe.read(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
