"""The format of stored programs: what was put in comes out, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.store import CorruptError, pack, unpack


@given(st.dictionaries(st.text(), st.integers() | st.text()), st.lists(st.binary(max_size=40), max_size=4))
def test_round_trip(header: dict[str, int | str], blobs: list[bytes]) -> None:
    header.pop("blob sizes", None)
    assert unpack(pack(header, blobs)) == (header, blobs)


def test_every_changed_byte_is_noticed() -> None:
    data = pack({"a": 1}, [b"abc", b"", b"xyz"])
    for k in range(len(data)):
        changed = bytearray(data)
        changed[k] ^= 1
        with pytest.raises(CorruptError):
            unpack(bytes(changed))


def test_every_cut_is_noticed() -> None:
    data = pack({"a": 1}, [b"abc"])
    for k in range(len(data)):
        with pytest.raises(CorruptError):
            unpack(data[:k])
    with pytest.raises(CorruptError):
        unpack(data + b"more")
