"""Why a call cannot be replayed."""

from __future__ import annotations


class NotReplayableError(Exception):
    """Why a call cannot be replayed. Not an error of the program: the call was recorded, and its results are right."""


def where(location: tuple[str, int]) -> str:
    """A place in the user's program."""
    file, line = location
    return f"{file}:{line}" if file else "an unknown line"
