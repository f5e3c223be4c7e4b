"""Running a backend's code isolated from what the user's thread has switched on.

A value may be asked for anywhere: under autocast, in a `with torch.device(...)` block, inside a dispatch mode or a
function transform, on the autograd engine's thread. All that has had its effect on what was recorded; it must not act
again on the operators that compute it.
"""

from __future__ import annotations

# `signal` without its enumerations, which cost more than the calls: this is done every step.
import _signal  # type: ignore[import-not-found]
import _thread
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack
from torch.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes  # private; checked on torch 2.11 and 2.13

from tarry import places
from tarry.errors import TarryError
from tarry.native import C

T = TypeVar("T")


class PlainDispatch:
    """Within the block, operators on real tensors are kernels and nothing else. For running programs: cheap."""

    __slots__ = ("_around", "_functions", "_guard")

    def __enter__(self) -> None:
        self._around = _modes_off() if _len_torch_dispatch_stack() or torch.is_inference_mode_enabled() else None
        # While it lives, the dispatcher's state of this thread is cleared.
        self._guard: C.PlainDispatch | None = C.PlainDispatch()
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._functions.__exit__(*exc_info)
        self._guard = None
        if self._around is not None:
            self._around.close()


def _modes_off() -> ExitStack:
    """Takes the user's modes off the thread's stack, until it is closed."""
    stack = ExitStack()
    # The native guard would do, but some functions (Tensor.numpy) switch on what is on the stack when they return.
    stack.enter_context(_disable_current_modes())
    if torch.is_inference_mode_enabled():
        # What is made in inference mode cannot be written outside it, and a step's results outlive the block.
        stack.enter_context(torch.inference_mode(False))
    return stack


@contextmanager
def compiling() -> Iterator[None]:
    """On a thread of its own, where nothing is switched on: what is done in the block is compiling."""
    C.set_compiling(True)
    try:
        with torch.no_grad():
            yield
    finally:
        C.set_compiling(False)


def isolated(function: Callable[[], T]) -> T:
    """Call a function on a thread of its own, where nothing is switched on. For compiling: that uses modes itself.

    The collector stays off: a finaliser of the user's that needs a value could not be served on that thread. The thread
    is a plain one, since an interrupt in the middle of `threading.Thread.start()` or `join()` may come out as another
    error."""
    outcome: list[T] = []
    failure: list[BaseException] = []
    done = _thread.allocate_lock()
    done.acquire()

    def work() -> None:
        try:
            with compiling():
                outcome.append(function())
        except BaseException as error:
            failure.append(error)
        finally:
            done.release()

    _thread.start_new_thread(work, ())
    done.acquire()
    if failure:
        try:
            raise failure[0]
        finally:
            failure.clear()  # the error's traceback knows this list: together they would outlive the error
    return outcome[0]


def refuse_while_compiling() -> None:
    """Raise if a backend asks for a value on device 'tarry' while it compiles: the step it compiles has to come
    first."""
    if C.is_compiling():
        raise TarryError(
            "a value on device 'tarry' was asked for while a backend compiles. Backends work on the graph they are "
            "given, and on tensors of the real device."
        )


def profiled(name: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a range that torch.profiler shows, with the user's line. Making one costs microseconds: only
    while it looks."""
    if torch._C._autograd._profiler_enabled():
        with record_function(name + places.label()):
            return function(*arguments)
    return function(*arguments)


def on_device(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that computes a step: a profiler takes its time for that of the device."""
    time = C.DeviceTime() if torch._C._autograd._profiler_enabled() else None
    try:
        return function(*arguments)
    finally:
        del time


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back an interrupt while buffers are being overwritten: a step is either done or not begun."""
    before = _signal.getsignal(_signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # no handler of Python's would run here
        return
    held: list[Any] = []
    _signal.signal(_signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        _signal.signal(_signal.SIGINT, before)
        if held:
            before(*held[0])
