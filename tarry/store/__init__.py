"""Compiled programs on disk, so that a second process compiles nothing.

A backend turns a program into bytes and back (`Computation.artifact`, `Backend.load`); what is kept under which name,
when it is thrown away and what happens to a damaged file is decided here. See docs/compiling.md.
"""

from __future__ import annotations

from tarry.store.blobs import CorruptError, pack, unpack
from tarry.store.files import Store
from tarry.store.identity import Identity, identify, identify_note, identify_range

__all__ = ["CorruptError", "Identity", "Store", "identify", "identify_note", "identify_range", "pack", "unpack"]
