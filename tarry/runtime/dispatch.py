"""Running a backend's code apart from what the user's thread has switched on.

A value may be asked for anywhere: under autocast, in a `with torch.device(...)` block, inside a dispatch mode or a function
transform, on the autograd engine's thread. All that has had its effect on what was recorded; it must not act again on
the operators that compute it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from tarry.errors import TarryError

T = TypeVar("T")
_state = threading.local()


@contextmanager
def plain_dispatch(guard: Callable[[], object]) -> Iterator[None]:
    """Within the block, operators on real tensors are kernels and nothing else. For running programs: cheap."""
    held = guard()
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        del held


def apart(function: Callable[[], T]) -> T:
    """Call a function on a thread of its own, where nothing is switched on. For compiling: that uses modes itself."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        _state.apart = True
        try:
            with torch.no_grad():
                outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="tarry-compile", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def refuse_apart() -> None:
    """Raise if a backend asks for a value on device 'tarry' while it compiles: the step it compiles has to come first."""
    if getattr(_state, "apart", False):
        raise TarryError(
            "a value on device 'tarry' was asked for while a backend compiles. Backends work on the graph they are "
            "given, and on tensors of the real device."
        )
