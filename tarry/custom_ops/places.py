"""Where things are declared, so that a second declaration can say where the first one is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FuncAndLocation:
    """A registered function, and the line ("file:line") that registered it."""

    func: Callable[..., Any]
    location: str


@dataclass(frozen=True)
class Place:
    """A line of a program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_interactive(self) -> bool:
        """Whether it was typed into a prompt or a notebook, where declaring a thing again means changing it."""
        return "ipykernel" in self.file or not Path(self.file).is_file()


_OURS = str(Path(__file__).parent)


def caller() -> Place:
    """The line of the user's program that led here."""
    frame = sys._getframe(frames_to_caller())
    return Place(frame.f_code.co_filename, frame.f_lineno)


def frames_to_caller() -> int:
    """How many frames up from the function that asks the user's program is."""
    depth = 1
    while sys._getframe(depth + 1).f_code.co_filename.startswith(_OURS):
        depth += 1
    return depth
