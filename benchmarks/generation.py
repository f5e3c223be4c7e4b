"""Greedy generation with a growing cache, from a cold start: each token has new shapes, so each graph is new.

    python -m benchmarks generation                  # the table
    python -m benchmarks generation --json out.json  # and every sample

`cold` is the first generation of a process, `again` the same once more in the same process, `later` one after some
more, when whatever was compiled in the background has been waited for.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks._peers import Eager, Peer, Tarry
from benchmarks._report import medians, ratio, show, write_json
from benchmarks.generators import BATCH, GENERATORS, PROMPT
from benchmarks.sizes import VOCABULARY

PHASES = ("cold", "again", "later")
WARM_UP = 20
"""Generations before the last phase: tiny models take that many until a compiled program is worth having."""


@dataclass(frozen=True)
class Outcome:
    """What a process of one peer did: seconds of each phase, tokens, and how many programs were compiled."""

    seconds: dict[str, float]
    tokens: list[list[int]]
    compiles: dict[str, int]


def generate(pipe: Connection, model: str, peer: Peer, new: int, warm: int) -> None:
    """A peer's process: generate, and answer with an Outcome, or with a string that says what failed."""
    torch.set_num_threads(1)
    try:
        peer.start()
        torch.manual_seed(0)
        build = GENERATORS[model](peer.device)
        prompt = torch.randint(3, VOCABULARY, (BATCH, PROMPT)).to(peer.device)
        peer.cut()
        seconds: dict[str, float] = {}
        compiles: dict[str, int] = {}
        for phase in PHASES:
            for _ in range(WARM_UP if phase == "later" else 0):
                build(prompt, new).tolist()
                peer.ready()
            times = []
            for _ in range(warm if phase == "later" else 1):
                begin = time.perf_counter()
                tokens = build(prompt, new).tolist()
                times.append(time.perf_counter() - begin)
            seconds[phase] = statistics.median(times)
            compiles[phase] = _compiles(peer)
            peer.cut()
        pipe.send(Outcome(seconds, tokens, compiles))
    except Exception as error:  # a peer's failure is a result; the others' times are still wanted
        lines = str(error).splitlines() or [""]
        pipe.send(f"{type(error).__name__}: {lines[0]}")


def _compiles(peer: Peer) -> int:
    if not isinstance(peer, Tarry):
        return 0
    import tarry

    return int(tarry.metrics.counters().get("compile", 0))


def in_process(model: str, peer: Peer, new: int, warm: int) -> Outcome | str:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=generate, args=(there, model, peer, new, warm), daemon=True)
    process.start()
    there.close()
    try:
        reply: Outcome | str = here.recv()
    except EOFError:
        reply = "its process died"
    process.join()
    return reply


def measure(
    model: str, peers: Sequence[Peer], new: int, warm: int, rounds: int
) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    """Milliseconds per token: phase -> peer -> one per process; and what there is to say."""
    samples: dict[str, dict[str, list[float]]] = {phase: {peer.name: [] for peer in peers} for phase in PHASES}
    notes: list[str] = []
    expected: list[list[int]] | None = None
    for number in range(rounds):
        for peer in peers:
            outcome = in_process(model, peer, new, warm)
            if isinstance(outcome, str):
                notes.append(f"{model}: {peer.name} fails: {outcome}")
                continue
            for phase, seconds in outcome.seconds.items():
                samples[phase][peer.name].append(seconds / new * 1e3)
            expected = expected or outcome.tokens
            if outcome.tokens != expected:
                notes.append(f"{model}: {peer.name} gives other tokens than {peers[0].name}: WRONG")
            if number == 0 and isinstance(peer, Tarry):
                counts = ", ".join(f"{phase} {n}" for phase, n in outcome.compiles.items())
                notes.append(f"{model}: programs made by {peer.name} until the end of: {counts}")
    return samples, notes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks generation",
        description="Greedy generation of tiny language models on tarry, from a cold start, against eager PyTorch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes per model and peer; the table shows medians")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of one generation")
    parser.add_argument("--warm", type=int, default=5, help="generations of the last phase")
    parser.add_argument("--device", default="cpu", help="the real device")
    parser.add_argument(
        "--backends", nargs="+", default=["eager", "default"], help="tarry's; `default` is what it chooses by itself"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="MODEL", help=f"of {', '.join(GENERATORS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args(argv)
    unknown = set(options.only) - set(GENERATORS)
    if unknown:
        print(f"no model is called {', '.join(unknown)}; there are {', '.join(GENERATORS)}", file=sys.stderr)
        return 2
    peers: list[Peer] = [Eager(options.device)]
    peers += [Tarry(name, options.device, name=f"tarry {name}") for name in options.backends]
    samples: dict[str, dict[str, list[float]]] = {}
    notes: list[str] = []
    for model in options.only or GENERATORS:
        rows, said = measure(model, peers, options.tokens, options.warm, options.rounds)
        samples |= {f"{model}, {phase}": row for phase, row in rows.items()}
        notes += said
    table = medians(samples)
    for phase in PHASES:
        for peer in peers[1:]:
            found = [ratio(row, peer.name, "eager") for case, row in table.items() if case.endswith(f", {phase}")]
            known = [value for value in found if value is not None]
            if known:
                middle = statistics.median(known)
                notes.append(f"{phase}, {peer.name}/eager: median {middle:.2f}, most {max(known):.2f}")
    title = f"generation of {options.tokens} tokens, torch {torch.__version__}, one thread, on {options.device}"
    show(title, samples, [peer.name for peer in peers], "ms per token", notes)
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        write_json(options.json, "generation", "ms per token", samples, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
