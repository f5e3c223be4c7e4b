"""What reading values costs: single reads, and programs that read often, against eager PyTorch.

    python -m benchmarks reads                  # the table, with one thread and with all cores
    python -m benchmarks reads --json out.json  # and every sample

`cold` is the mean of the first steps of a process, `warm` the best of many turns later, when whatever was compiled in
the background has been waited for. tarry runs as a user gets it who chooses nothing.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks._peers import Eager, Peer, Tarry
from benchmarks._report import reason, show, write_json
from benchmarks.reading_programs import PROGRAMS, READS
from benchmarks.training_programs import TRAINING

PHASES = ("cold", "warm")
COLD_STEPS = 20
WARM_UP = 1.0  # seconds of steps before the second phase
COMPILE = 60.0  # seconds that compiling in the background may take: some programs make new graphs all the time
TURNS = 15
TURN = 0.05  # seconds of a turn, about
ALL = READS | PROGRAMS | TRAINING


@dataclass(frozen=True)
class Outcome:
    """Microseconds per step of each phase, and what the steps gave."""

    times: dict[str, float]
    given: list[float]


def _time_of(step: object, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        step()  # type: ignore[operator]
    return (time.perf_counter() - begin) / count


def run(pipe: Connection, name: str, peer: Peer, threads: int) -> None:
    """A peer's process: take steps, and answer with an Outcome, or with a string that says what failed."""
    torch.set_num_threads(threads)
    try:
        peer.start()
        torch.manual_seed(0)
        program = ALL[name](peer.device)
        peer.cut()
        given: list[float] = []
        cold = _time_of(lambda: given.append(program.step()), COLD_STEPS)
        until = time.perf_counter() + WARM_UP
        while time.perf_counter() < until:
            program.step()
        peer.ready(COMPILE)
        count = max(1, round(TURN / _time_of(program.step, 5)))
        warm = min(_time_of(program.step, count) for _ in range(TURNS))
        pipe.send(Outcome({"cold": cold * 1e6, "warm": warm * 1e6}, given))
    except Exception as error:  # a peer's failure is a result; the others' times are still wanted
        pipe.send(reason(error))


def in_process(name: str, peer: Peer, threads: int) -> Outcome | str:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run, args=(there, name, peer, threads), daemon=True)
    process.start()
    there.close()
    try:
        reply: Outcome | str = here.recv()
    except EOFError:
        reply = "its process died"
    process.join()
    return reply


def measure(
    name: str, peers: Sequence[Peer], threads: int, rounds: int
) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    """Microseconds per step: phase -> peer -> one per process; and what there is to say."""
    samples: dict[str, dict[str, list[float]]] = {phase: {peer.name: [] for peer in peers} for phase in PHASES}
    notes: list[str] = []
    expected: list[float] | None = None
    for _ in range(rounds):
        for peer in peers:
            outcome = in_process(name, peer, threads)
            if isinstance(outcome, str):
                notes.append(f"{name}: {peer.name} fails: {outcome}")
                continue
            for phase, time_ in outcome.times.items():
                samples[phase][peer.name].append(time_)
            expected = expected or outcome.given
            if not all(map(_close, outcome.given, expected)):
                notes.append(f"{name}: {peer.name} gives other numbers than {peers[0].name}: WRONG")
    return samples, notes


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks reads",
        description="What reading values costs on tarry, as a user gets it who chooses nothing, against eager PyTorch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--rounds", type=int, default=3, help="processes per row and peer; the table shows medians")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, cores], help="of PyTorch")
    parser.add_argument("--only", nargs="+", default=list(ALL), choices=tuple(ALL), metavar="ROW", help=", ".join(ALL))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args(argv)
    peers: list[Peer] = [Eager("cpu"), Tarry("default", "cpu")]
    samples: dict[str, dict[str, list[float]]] = {}
    notes: list[str] = []
    for name in options.only:
        for threads in options.threads:
            rows, said = measure(name, peers, threads, options.rounds)
            samples |= {f"{name}, {threads} threads, {phase}": row for phase, row in rows.items()}
            notes += said
    title = f"reads, torch {torch.__version__}, default policy"
    show(title, samples, [peer.name for peer in peers], "µs per step", notes)
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        write_json(options.json, "reads", "us", samples, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
