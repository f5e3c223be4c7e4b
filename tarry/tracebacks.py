"""Tracebacks that show the program's frames, and none of tarry's.

Where an error leaves tarry for the program (`leave`), what tarry's own frames would say is taken away; under `tarry
run`, also from tracebacks that are printed (`without_ours`). TARRY_FULL_TRACEBACKS=1 keeps all frames.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from tarry.config import config
from tarry.places import is_ours


def leave(error: BaseException, handled: BaseException | None) -> BaseException:
    """The error as the program is to see it. `handled` is what the program was handling when it called tarry: errors
    that tarry has handled since are left out, unless they are the cause."""
    if not config.full_tracebacks:
        error.__context__ = None if handled is error else handled
        if not isinstance(error, AssertionError):  # which is a fault of ours
            error.__traceback__ = None
    return error


def without_ours(error: BaseException, is_hidden: Callable[[str], bool] = is_ours) -> BaseException:
    """The error with frames of tarry taken out of its traceback, and out of those of what led to it."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and not config.full_tracebacks:
        seen.add(id(at))
        at.__traceback__ = _shown(at.__traceback__, is_hidden)
        at = at.__cause__ or at.__context__
    return error


def _shown(traceback: TracebackType | None, is_hidden: Callable[[str], bool]) -> TracebackType | None:
    entries = []
    while traceback is not None:
        if not is_hidden(traceback.tb_frame.f_code.co_filename):
            entries.append(traceback)
        traceback = traceback.tb_next
    shown: TracebackType | None = None
    for entry in reversed(entries):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown
