"""Time of a whole training step, loss read each step, against eager PyTorch, the Lazy Tensor Core and torch.compile.

    python -m benchmarks training [--threads N] [--compile] [--backends eager inductor] [--read-every N] [--json FILE]

Every peer trains the same model from the same weights on the same batch; a peer whose final loss strays from eager's
is reported, since a fast wrong step is worth nothing. Each has a process of its own, because eager CUDA training fails
in a process where any PrivateUse1 device is registered (PyTorch issue 161129); they still take turns, round by round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._peers import Compiled, Eager, LazyTensorCore, Peer, Replayed, Tarry
from benchmarks._report import reason, show, write_json
from benchmarks.programs import ALL_PROGRAMS, PROGRAMS, Program

TURN = 0.3
"""Seconds. The first steps of a turn find the caches full of another peer's data; they must not count for much."""

CORES_PER_PEER = 3
"""With that many, all peers warm up at the same time: most compile for a minute, each for itself."""


class Trainer:
    """One program on one peer, ready to take steps."""

    def __init__(self, program: Program, peer: Peer, read_every: int = 1) -> None:
        torch.manual_seed(0)
        self.peer = peer
        self._read_every = read_every
        self._taken = 0
        model = program.model().to(peer.device)
        inputs, targets = program.batch()
        self._inputs, self._targets = inputs.to(peer.device), targets.to(peer.device)
        self._optimizer = program.optimizer(model)
        self._loss = program.loss
        self._precision: AbstractContextManager[Any] = nullcontext()
        if program.autocast:
            self._precision = torch.autocast(torch.device(peer.device).type, dtype=torch.bfloat16)
        self._model: Callable[..., torch.Tensor] | nn.Module = model
        self._train: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._recorded_or_run
        if isinstance(peer, Compiled):
            self._model = peer.wrap(model)
        elif isinstance(peer, Replayed):
            self._train = peer.wrap(self._recorded_or_run)

    def _recorded_or_run(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self._precision:
            loss = self._loss(self._model(inputs), targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def step(self) -> float:
        return self.steps(1)

    def steps(self, count: int) -> float:
        """The last loss, which is read in any case: all steps are done then."""
        for _ in range(count):
            loss = self._train(self._inputs, self._targets)
            self.peer.end_step()
            self._taken += 1
            if self._taken % self._read_every == 0:
                loss.item()
        return loss.item()


def serve(pipe: Connection, program_name: str, peer: Peer, warm_up: int, read_every: int, threads: int) -> None:
    """A peer's process: warm up and answer with the seconds of the first step, then run as many steps as asked for.

    Answers are (seconds, loss), or a string that says what failed.
    """
    torch.set_num_threads(threads)
    try:
        peer.start()
        trainer = Trainer(ALL_PROGRAMS[program_name], peer, read_every)
        steps = 1
        while steps:
            begin = time.perf_counter()
            loss = trainer.steps(steps)
            seconds = time.perf_counter() - begin
            if warm_up:
                _warm_up(trainer, warm_up)
                warm_up = 0
            pipe.send((seconds, loss))
            steps = pipe.recv()
    except Exception as error:  # a peer's failure is a result; the others' times are still wanted
        pipe.send(reason(error))


def _warm_up(trainer: Trainer, steps: int) -> None:
    """Take steps until what is timed from then on is the steady state: what was compiled has taken over."""
    trainer.steps(steps)
    trainer.peer.ready()
    trainer.steps(10)  # a program becomes a CUDA graph after some runs


def measure(
    program: Program,
    peers: Sequence[Peer],
    warm_up: int,
    rounds: int,
    steps: int | None,
    read_every: int = 1,
    threads: int = 1,
) -> tuple[dict[str, list[float]], list[str]]:
    """Milliseconds per step of each peer, one per round, and notes about peers that failed or disagree."""
    samples: dict[str, list[float]] = {peer.name: [] for peer in peers}
    pipes: dict[str, Connection] = {}
    losses: dict[str, float] = {}
    notes: list[str] = []
    processes = []

    def answer(name: str) -> float | None:
        """Seconds that the peer took; None, and no more turns for it, if it failed."""
        try:
            reply = pipes[name].recv()
        except EOFError:
            reply = "its process died"
        if isinstance(reply, str):
            notes.append(f"{program.name}: {name} fails: {reply}")
            del pipes[name]
            return None
        seconds, losses[name] = reply
        return float(seconds)

    def note_first_step(name: str) -> None:
        first = answer(name)
        if first is not None:
            beside = "" if alone else ", beside the others"
            notes.append(f"{program.name}: first step of {name} {first * 1e3:.0f} ms{beside}")

    alone = (os.cpu_count() or 1) < CORES_PER_PEER * len(peers)  # compilers that share cores slow each other down
    for peer in peers:
        process, pipes[peer.name] = _start(program.name, peer, warm_up - 1, read_every, threads)
        processes.append(process)
        if alone:
            note_first_step(peer.name)
    for name in [] if alone else list(pipes):
        note_first_step(name)
    if steps is None:
        steps = _steps_for(TURN, pipes, answer)
    for _ in range(rounds):
        for name in list(pipes):
            pipes[name].send(steps)
            seconds = answer(name)
            if seconds is not None:
                samples[name].append(seconds / steps * 1e3)
    for pipe in pipes.values():
        pipe.send(0)
    for process in processes:
        process.join()
    for name, loss in losses.items():
        if "eager" in losses and abs(loss - losses["eager"]) > 0.02 * max(abs(losses["eager"]), 0.05):
            notes.append(f"{program.name}: {name} ends at loss {loss:.4f}, eager at {losses['eager']:.4f}: WRONG")
    return samples, notes


def _start(*given: Any) -> tuple[BaseProcess, Connection]:
    """A process that serves what is given to `serve`, and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, *given), daemon=True)
    process.start()
    there.close()
    return process, here


def _steps_for(seconds: float, pipes: dict[str, Connection], answer: Callable[[str], float | None]) -> int:
    """How many steps take about that long, by the first peer that works. All take these steps: losses are compared."""
    found: int | None = None
    for name in list(pipes):
        pipes[name].send(5)
        taken = answer(name)
        if taken is not None and found is None:
            found = max(5, round(5 * seconds / taken))
    return found or 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks training",
        description="Time of a training step on tarry, against eager PyTorch, the Lazy Tensor Core and torch.compile.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds; the table shows their medians")
    parser.add_argument("--steps", type=int, help=f"steps in a turn; as many as take about {TURN} s if not given")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before the first round")
    parser.add_argument("--read-every", type=int, default=1, metavar="N", help="steps from one read loss to the next")
    parser.add_argument("--device", default="cpu", help="the real device")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch's kernels")
    parser.add_argument("--backends", nargs="+", default=["eager", "torchscript", "inductor"], help="tarry's backends")
    parser.add_argument("--compile", action="store_true", help="torch.compile too (compiles for a minute or more)")
    parser.add_argument("--without", nargs="*", default=[], metavar="PEER", help="leave out: eager, LTC")
    parser.add_argument("--only", default="", metavar="WORD", help="programs with this word in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args(argv)
    programs = [program for program in PROGRAMS if options.only.lower() in program.name.lower()]
    if not programs:
        print(f"no program has {options.only!r} in its name: {[p.name for p in PROGRAMS]}", file=sys.stderr)
        return 2
    everyone: list[Peer] = [Eager(options.device), LazyTensorCore()]
    if options.compile:
        everyone.append(Compiled(options.device))
    everyone += [Tarry(backend, options.device, name=f"tarry {backend}") for backend in options.backends]
    peers = [peer for peer in everyone if peer.name not in options.without]
    samples: dict[str, dict[str, list[float]]] = {}
    notes: list[str] = []
    for program in programs:
        samples[program.name], said = measure(
            program, peers, options.warm_up, options.rounds, options.steps, options.read_every, options.threads
        )
        notes += said
    show(
        f"training step, torch {torch.__version__}, {options.threads} threads, real device {options.device}",
        samples,
        [peer.name for peer in peers],
        "ms",
        notes,
    )
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        write_json(options.json, "training_step", "ms", samples, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
