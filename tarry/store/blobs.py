"""The format of stored programs: a JSON header and some blobs, under a checksum.

Nothing in it is code until its reader says so: unlike a pickle, it can be looked at without running anything.

    magic · sha256 of the rest · length of the header · header · blobs, one after the other
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

MAGIC = b"tarry1\n\0"
_DIGEST = hashlib.sha256().digest_size
_SIZES = "blob sizes"


class CorruptError(ValueError):
    """Bytes that are no such file: cut off, changed, or of another program."""


def pack(header: Mapping[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> bytes:
    """A header of JSON values and some blobs as one piece."""
    text = json.dumps({**header, _SIZES: [len(blob) for blob in blobs]}, separators=(",", ":")).encode()
    body = b"".join((len(text).to_bytes(8, "little"), text, *blobs))
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes | memoryview) -> tuple[dict[str, Any], list[memoryview]]:
    """The header and the blobs of a piece. Raises CorruptError."""
    view = memoryview(data)
    start = len(MAGIC) + _DIGEST
    if bytes(view[: len(MAGIC)]) != MAGIC or len(view) < start + 8:
        raise CorruptError("no stored program")
    body = view[start:]
    if hashlib.sha256(body).digest() != view[len(MAGIC) : start]:
        raise CorruptError("the checksum is wrong")
    length = int.from_bytes(body[:8], "little")
    try:
        header = json.loads(bytes(body[8 : 8 + length]))
        sizes: list[int] = header.pop(_SIZES)
    except (ValueError, KeyError, AttributeError) as error:
        raise CorruptError(f"the header makes no sense: {error}") from None
    blobs = []
    position = 8 + length
    for size in sizes:
        blobs.append(body[position : position + size])
        position += size
    if position != len(body):
        raise CorruptError("the sizes do not add up")
    return header, blobs
