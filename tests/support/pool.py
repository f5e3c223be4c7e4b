"""A pool of child processes for surveys, where one task's crash or hang is that task's result and nothing more.

``concurrent.futures`` breaks the whole pool when a worker dies; a survey of hundreds of operators on a native extension
must go on.
"""

from __future__ import annotations

import functools
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What became of one task: a value, or the way it died."""

    task: str
    value: Any = None
    crash: str | None = None
    seconds: float = 0.0


class Retire(Exception):  # noqa: N818 - it carries a result, not an error
    """Raised by a task that has its result but has left the process in a state that would spoil the next task."""

    def __init__(self, value: Any) -> None:
        super().__init__("the worker asks to be replaced")
        self.value = value


def _serve(
    pipe: Connection, setup: Callable[..., None], setup_args: tuple[Any, ...], work: Callable[[str], Any]
) -> None:
    """The child's loop: set up once, say so, then answer task after task."""
    try:
        setup(*setup_args)
    except BaseException:
        pipe.send(("no setup", traceback.format_exc()))
        return
    pipe.send(("ready", None))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("done", work(task))
        except Retire as last:
            answer = ("last", last.value)
        except BaseException as error:  # the parent decides; the worker must live on
            answer = ("raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        pipe.send(answer)


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    ready: bool = False
    task: str | None = None
    since: float = 0.0


def _death(process: BaseProcess) -> str:
    process.join(5)
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"


def _answer(worker: _Worker) -> tuple[str, Any]:
    """What the child says, or ("died", how)."""
    try:
        answer: tuple[str, Any] = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        return "died", _death(worker.process)
    return answer


def _start(setup: Callable[..., None], setup_args: tuple[Any, ...], work: Callable[[str], Any]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, setup, setup_args, work), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def run_pool(
    tasks: Iterable[str],
    work: Callable[[str], Any],
    *,
    setup: Callable[..., None],
    setup_args: tuple[Any, ...] = (),
    jobs: int = 1,
    timeout: float = 120.0,
) -> Iterator[Outcome]:
    """Run ``work(task)`` for each task in ``jobs`` children and yield outcomes as they come.

    A child that dies or passes ``timeout`` seconds on a task is replaced, and its task is reported as a crash. Setting
    up is not timed (it may build native code), and a child that cannot be set up ends the run: every task would fail.
    """
    queue = list(tasks)[::-1]
    start = functools.partial(_start, setup, setup_args, work)

    def give(worker: _Worker) -> None:
        worker.task = queue.pop() if queue else None
        worker.since = time.monotonic()
        if worker.task is not None:
            worker.pipe.send(worker.task)

    workers = [start() for _ in range(min(jobs, len(queue)))]
    try:
        while workers:
            said = wait([w.pipe for w in workers], timeout=1.0)
            for worker in list(workers):
                spent = time.monotonic() - worker.since
                if worker.pipe in said:
                    kind, value = _answer(worker)
                elif worker.ready and spent > timeout:
                    kind, value = "died", f"no answer within {timeout:.0f} s"
                else:
                    continue
                if kind == "no setup" or (kind == "died" and not worker.ready):
                    raise RuntimeError(f"a child of the survey could not be set up: {value}")
                if kind == "ready":
                    worker.ready = True
                else:
                    assert worker.task is not None
                    crash = {"raised": f"harness error: {value}", "died": value}.get(kind)
                    yield Outcome(worker.task, value if crash is None else None, crash, spent)
                if kind in ("died", "last"):
                    _stop(worker)
                    workers.remove(worker)
                    if queue:
                        workers.append(start())
                    continue
                give(worker)
                if worker.task is None:
                    _stop(worker)
                    workers.remove(worker)
    finally:
        for worker in workers:
            _stop(worker)


def _stop(worker: _Worker) -> None:
    """Closing the pipe ends an idle child; one that does not end is killed."""
    worker.pipe.close()
    worker.process.join(0.5)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
