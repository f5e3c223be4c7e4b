"""Time of a whole training step, loss read each step, against eager PyTorch, the Lazy Tensor Core and torch.compile.

python -m benchmarks training [--compile] [--json FILE]

Every peer trains the same model from the same weights on the same batches; a peer whose final loss strays from eager's
is reported, since a fast wrong step is worth nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks._peers import Eager, LazyTensorCore, Peer, Tarry, started
from benchmarks._report import show, write_json
from benchmarks.programs import PROGRAMS, Program


class Compiled(Eager):
    """torch.compile on the model, with its default backend."""

    name = "compile"


class Trainer:
    """One program on one peer, ready to take steps."""

    def __init__(self, program: Program, peer: Peer) -> None:
        torch.manual_seed(0)
        self.peer = peer
        model = program.model().to(peer.device)
        inputs, targets = program.batch()
        self._inputs, self._targets = inputs.to(peer.device), targets.to(peer.device)
        self._optimizer = program.optimizer(model)
        self._loss = program.loss
        self._model: Callable[..., torch.Tensor] | nn.Module = model
        if isinstance(peer, Compiled):
            self._model = torch.compile(model)

    def step(self) -> float:
        loss = self._loss(self._model(self._inputs), self._targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.peer.end_step()
        return loss.item()


def measure(
    program: Program, peers: Sequence[Peer], warm_up: int, rounds: int, steps: int
) -> tuple[dict[str, list[float]], list[str]]:
    """Milliseconds per step of each peer, one per round, and notes about peers that failed or disagree."""
    notes: list[str] = []
    trainers: dict[str, Trainer] = {}
    losses: dict[str, float] = {}
    for peer in peers:
        try:
            trainer = Trainer(program, peer)
            begin = time.perf_counter()
            trainer.step()
            first = time.perf_counter() - begin
            for _ in range(warm_up - 1):
                trainer.step()
        except Exception as error:  # one peer's failure is a result; the others' times are still wanted
            notes.append(f"{program.name}: {peer.name} fails: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        notes.append(f"{program.name}: first step of {peer.name} {first * 1e3:.0f} ms")
        trainers[peer.name] = trainer
    samples: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            begin = time.perf_counter()
            for _ in range(steps):
                losses[name] = trainer.step()
            samples[name].append((time.perf_counter() - begin) / steps * 1e3)
    for name, loss in losses.items():
        if "eager" in losses and abs(loss - losses["eager"]) > 0.02 * max(abs(losses["eager"]), 0.05):
            notes.append(f"{program.name}: {name} ends at loss {loss:.4f}, eager at {losses['eager']:.4f}: WRONG")
    return samples, notes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks training",
        description="Time of a training step on tarry, against eager PyTorch, the Lazy Tensor Core and torch.compile.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds; the table shows their medians")
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the first round")
    parser.add_argument("--device", default="cpu", help="the real device")
    parser.add_argument("--backend", default="eager", help="tarry's backend")
    parser.add_argument("--compile", action="store_true", help="torch.compile too (compiles for a minute or more)")
    parser.add_argument("--without", nargs="*", default=[], metavar="PEER", help="leave out: eager, LTC, tarry")
    parser.add_argument("--only", default="", metavar="WORD", help="programs with this word in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args(argv)
    programs = [program for program in PROGRAMS if options.only.lower() in program.name.lower()]
    if not programs:
        print(f"no program has {options.only!r} in its name: {[p.name for p in PROGRAMS]}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    everyone: list[Peer] = [Eager(options.device), LazyTensorCore(), Tarry(options.backend, options.device)]
    if options.compile:
        everyone.append(Compiled(options.device))
    peers = started([peer for peer in everyone if peer.name not in options.without])
    samples: dict[str, dict[str, list[float]]] = {}
    notes: list[str] = []
    for program in programs:
        samples[program.name], said = measure(program, peers, options.warm_up, options.rounds, options.steps)
        notes += said
    show(
        f"training step, torch {torch.__version__}, one thread, real device {options.device}, "
        f"backend {options.backend}",
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
