"""Which line of the program something happened at: the user's line, and that of the library between it and torch.

Walking up the frames costs microseconds, so it is done for events that have subscribers, and not for each operator
(csrc/record/provenance.h does that).
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

from tarry.events import watched

_PACKAGE = f"{Path(__file__).parent}/"
_EXAMPLES = f"{_PACKAGE}examples/"
_STANDARD = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_INSTALLED = ("/site-packages/", "/dist-packages/")


@functools.cache
def is_users(file: str) -> bool:
    """Whether code of this file belongs to the program itself: not to tarry, a library or Python."""
    return not (file.startswith("<frozen") or file.startswith(_STANDARD) or is_ours(file)) and not any(
        part in file for part in _INSTALLED
    )


@functools.cache
def is_ours(file: str) -> bool:
    """Whether code of this file is part of tarry; its examples are programs as any."""
    return file.startswith(_PACKAGE) and not file.startswith(_EXAMPLES)


@functools.cache
def _is_library(file: str) -> bool:
    return not (is_users(file) or is_ours(file) or file.startswith("<frozen")) and "/torch/" not in file


def of_caller() -> dict[str, Any]:
    """The fields of an event that say where the calling thread is, if events have subscribers: `file` and `line` of
    the user's program, and `library`, the innermost line of a library below it, or "". Empty if it is not known: on a
    thread that runs nothing of the user's."""
    if not watched():
        return {}
    library = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return {"file": file, "line": frame.f_lineno, "library": library}
        if not library and _is_library(file) and not file.startswith(_STANDARD):
            library = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return {}
