"""A pool of child processes for surveys, where one task's crash or hang is that task's result and nothing more.

``concurrent.futures`` breaks the whole pool when a worker dies; a survey of hundreds of operators on a native extension
must go on.
"""

from __future__ import annotations

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


def _serve(pipe: Connection, setup: Callable[..., None], setup_args: tuple[Any, ...], work: Callable[[str], Any]) -> None:
    """The child's loop: set up once, then answer task after task."""
    setup(*setup_args)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, work(task))
        except BaseException as error:  # the parent decides; the worker must live on
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        pipe.send(answer)


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    task: str | None = None
    since: float = 0.0


def _death(process: BaseProcess) -> str:
    process.join(5)
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"


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

    A child that dies or passes ``timeout`` seconds on a task is replaced, and its task is reported as a crash.
    """
    context = multiprocessing.get_context("spawn")
    queue = list(tasks)[::-1]
    workers: list[_Worker] = []

    def start() -> _Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, setup, setup_args, work), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def give(worker: _Worker) -> None:
        worker.task = queue.pop() if queue else None
        worker.since = time.monotonic()
        if worker.task is not None:
            worker.pipe.send(worker.task)

    try:
        for _ in range(min(jobs, len(queue))):
            workers.append(start())
            give(workers[-1])
        while any(w.task is not None for w in workers):
            busy = [w for w in workers if w.task is not None]
            ready = wait([w.pipe for w in busy], timeout=1.0)
            for worker in busy:
                spent = time.monotonic() - worker.since
                crash: str | None = None
                value: Any = None
                if worker.pipe in ready:
                    try:
                        ok, value = worker.pipe.recv()
                        if not ok:
                            crash, value = f"harness error: {value}", None
                    except (EOFError, ConnectionResetError):
                        crash = _death(worker.process)
                elif spent > timeout:
                    worker.process.kill()
                    crash = f"no answer within {timeout:.0f} s"
                else:
                    continue
                assert worker.task is not None
                yield Outcome(worker.task, value, crash, spent)
                if crash is not None and not crash.startswith("harness error"):
                    worker.process.kill()
                    worker.process.join()
                    if not queue:
                        worker.task = None
                        continue
                    fresh = start()
                    worker.process, worker.pipe = fresh.process, fresh.pipe
                give(worker)
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
