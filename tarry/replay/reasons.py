"""Why a call cannot be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NotReplayableError(Exception):
    """Why a call cannot be replayed. Not an error of the program: the call was recorded, and its results are right."""


class DisturbedError(NotReplayableError):
    """Something else was going on during the call: it shows nothing about the function."""


def where(location: Sequence[Any]) -> str:
    """A line of the user's program: a file and a line."""
    file, line = location
    return f"{file}:{line}" if file else "an unknown line"
