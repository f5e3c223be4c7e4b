"""Which line of the program something happened at: the user's line, and that of the library between it and torch.

Whose a file is, is judged here; csrc/record/provenance.h walks the frames, for each operator and for events. For events
it walks further, which costs a microsecond, so it is done for those that have subscribers.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

from tarry.events import watched

USERS, LIBRARYS, INTERNAL = 0, 1, 2
"""Whose a file is: of the program itself, of an installed package, of torch, tarry or Python."""

_PACKAGE = f"{Path(__file__).parent}/"
_EXAMPLES = f"{_PACKAGE}examples/"
_STANDARD = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_GENERATED = ("<frozen", "<eval_with_key>")  # by Python's importer, by torch.fx
_INSTALLED = ("/site-packages/", "/dist-packages/")


@functools.cache
def judge(file: str) -> int:
    """Whose code of this file is."""
    if is_ours(file) or file.startswith((*_GENERATED, *_torch())):
        return INTERNAL
    if _is_script(file):
        return USERS  # wherever it lies
    if any(part in file for part in _INSTALLED):
        return LIBRARYS
    return INTERNAL if file.startswith(_STANDARD) else USERS


def is_users(file: str) -> bool:
    """Whether code of this file belongs to the program itself: not to tarry, a library or Python."""
    return judge(file) == USERS


@functools.cache
def is_ours(file: str) -> bool:
    """Whether code of this file is part of tarry; its examples are programs as any."""
    return file.startswith(_PACKAGE) and not file.startswith(_EXAMPLES)


@functools.cache
def _torch() -> tuple[str, ...]:
    spec = importlib.util.find_spec("torch")
    return () if spec is None else tuple(f"{folder}/" for folder in spec.submodule_search_locations or ())


def _is_script(file: str) -> bool:
    """Whether it is the file that Python was started with, and not a command that an installed package has."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    return script is not None and getattr(main, "__spec__", None) is None and os.path.abspath(script) == file


def fields(place: tuple[str, int, str, str]) -> dict[str, Any]:
    """A place as fields of an event."""
    return dict(zip(("file", "line", "library", "module"), place, strict=True))


def of_line(file: str, line: int, module: str) -> dict[str, Any]:
    """A line that was recorded as fields of an event. If it is a library's, the user's line is that of the caller."""
    if not file or judge(file) == USERS:
        return fields((file, line, "", module))
    users = here()
    return fields((users.get("file", ""), users.get("line", 0), f"{file}:{line}", module))


def label() -> str:
    """The user's line that the calling thread is at, as the rows of a profile show it: " (train.py:24)", or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})" if frame is not None else ""


def of_caller() -> dict[str, Any]:
    """The fields of an event that say where the calling thread is, if events have subscribers; empty if not, and if it
    is not known: on a thread that runs nothing of the user's."""
    return here() if watched() else {}


def here() -> dict[str, Any]:
    """The same, with or without a subscriber: for what happens rarely."""
    from tarry.native import C  # here: the command line judges files without the native part

    place = C.current_place()
    return fields(place) if place[0] else {}
