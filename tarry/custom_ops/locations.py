"""Where things are declared, so that a second declaration can say where the first one is."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

import torch


@dataclass(frozen=True)
class FuncAndLocation:
    """A registered function, and the line ("file:line") that registered it."""

    func: Callable[..., Any]
    location: str


@dataclass(frozen=True)
class Location:
    """A line of a program. `code` is what stands around it, as long as that can run; `declares` is the qualified name
    of the function that is declared there."""

    file: str
    line: int
    code: weakref.ref[CodeType] | None = field(default=None, compare=False)
    declares: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_interactive(self) -> bool:
        """Whether it was typed into a prompt or a notebook, where declaring a thing again means changing it."""
        return "ipykernel" in self.file or not Path(self.file).is_file()

    def declaring(self, function: Callable[..., Any]) -> Location:
        """The location as one where a function is declared."""
        return replace(self, declares=function.__qualname__)

    def is_again(self, first: Location) -> bool:
        """Whether a declaration here is that at `first` once more: a cell that is run again, or the same function of
        the same file. Its line may have changed before a reload, unless both lines are of one run of the file."""
        if first.is_interactive and self.is_interactive:
            return True
        if (first.file, first.declares) != (self.file, self.declares):
            return False
        code = first.code and first.code()
        return first.line == self.line or code is None or self.code is None or code is not self.code()


_OURS = (str(Path(__file__).parent), torch.library.__file__)
"""What a registration may pass through on its way here."""


def caller() -> Location:
    """The line of the user's program that led here."""
    frame = sys._getframe(frames_to_caller())
    return Location(frame.f_code.co_filename, frame.f_lineno, weakref.ref(frame.f_code))


def frames_to_caller() -> int:
    """How many frames up from the function that asks the user's program is."""
    depth = 1
    while sys._getframe(depth + 1).f_code.co_filename.startswith(_OURS):
        depth += 1
    return depth
