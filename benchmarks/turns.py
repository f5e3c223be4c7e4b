"""What programs that read cost beside eager PyTorch, for a machine that does other things as well.

    python -m benchmarks turns                 # all programs, with one thread
    python -m benchmarks turns --threads 2 --clock wall --only trainer hooks

Eager and tarry take turns in one process, so that what slows one down slows down the other, too; shown is the least
time of a step: processor time, which waiting for a core adds nothing to, or the wall clock's, for a machine that does
nothing else (compiling in the background, and threads of OpenMP that wait, add to the former). tarry runs as a user
gets it who chooses nothing, and is not given time to compile: most of such programs are over before a compiler is done.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from benchmarks._peers import Eager, Tarry
from benchmarks._report import reason
from benchmarks.reads import ALL, WARM_UP

TURN = 0.03  # seconds of a turn, about


CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}


def _time_of(step: object, count: int, clock: str) -> float:
    begin = CLOCKS[clock]()
    for _ in range(count):
        step()  # type: ignore[operator]
    return (CLOCKS[clock]() - begin) / count * 1e6


def run(pipe: Connection, name: str, threads: int, turns: int, clock: str) -> None:
    """A process: answer with microseconds per step of eager and of tarry, or with a string that says what failed."""
    torch.set_num_threads(threads)
    try:
        steps = []
        for peer in (Eager("cpu"), Tarry("default", "cpu")):
            peer.start()
            torch.manual_seed(0)
            steps.append(ALL[name](peer.device).step)
        until = time.perf_counter() + WARM_UP
        while time.perf_counter() < until:
            steps[1]()
        count = max(1, round(TURN * 1e6 / max(1.0, _time_of(steps[0], 5, clock))))
        samples = [[_time_of(step, count, clock) for step in steps] for _ in range(turns)]
        pipe.send([min(column) for column in zip(*samples, strict=True)])
    except Exception as error:  # one program's failure is a result; the others' times are still wanted
        pipe.send(reason(error))


def measure(name: str, threads: int, turns: int, clock: str) -> list[float] | str:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run, args=(there, name, threads, turns, clock), daemon=True)
    process.start()
    there.close()
    try:
        reply: list[float] | str = here.recv()
    except EOFError:
        reply = "its process died"
    process.join()
    return reply


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks turns",
        description="What a step of programs that read takes, eager and tarry in turns.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--turns", type=int, default=12, help="of each; the table shows the best")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="processor", help="whose time")
    parser.add_argument("--only", nargs="+", default=list(ALL), choices=tuple(ALL), metavar="ROW", help=", ".join(ALL))
    options = parser.parse_args(argv)
    print(f"{f'µs per step ({options.clock})':32} {'eager':>9} {'tarry':>9} ratio", flush=True)
    ratios = []
    for name in options.only:
        found = measure(name, options.threads, options.turns, options.clock)
        if isinstance(found, str):
            print(f"{name:32} fails: {found}", flush=True)
            continue
        ratios.append(found[1] / found[0])
        print(f"{name:32} {found[0]:9.1f} {found[1]:9.1f} {ratios[-1]:5.2f}", flush=True)
    if ratios:
        print(f"median of the ratios: {statistics.median(ratios):.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
