"""Steps that a program has done some seconds after its first began, from empty caches: what its user waits for.

    python -m benchmarks cold-start [--program NAME] [--seconds 10 30 60 120] [--peers eager compile tarry]
    python -m benchmarks cold-start --program "GPT by depth 16"     # also 2, 4, 8, 32: what compiling costs by depth

Each peer is a fresh process with empty caches of its own and PyTorch's default number of threads, one after the other.
Every loss is read. The clock starts with the first step; imports and making the model are not counted. *ready* is when
the last slow step had passed: from there on, no step took twice the time of the last ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks._peers import named
from benchmarks._report import show, write_json
from benchmarks.first_step import fresh_folders
from benchmarks.models import MODELS
from benchmarks.programs import ALL_PROGRAMS, DEPTHS, Program
from benchmarks.training_step import Trainer

PEERS = ("eager", "compile", "tarry")
SECONDS = (10.0, 30.0, 60.0, 120.0)
LAST = 20
"""Steps at the end whose median is the time of a step in the steady state."""
KNOWN = {program.name: program for program in (*ALL_PROGRAMS.values(), *DEPTHS, *MODELS)}


def count_here(program: Program, peer_name: str, device: str, seconds: float) -> list[float]:
    """Train for so long in this process: when each step ended."""
    peer = named(peer_name, device)
    peer.start()
    trainer = Trainer(program, peer)
    peer.cut()
    begin = time.perf_counter()
    ends: list[float] = []
    while not ends or ends[-1] < seconds:
        trainer.step()
        ends.append(time.perf_counter() - begin)
    return ends


def ready(ends: Sequence[float]) -> tuple[float, float]:
    """The time of a step in the steady state, and when that was reached, in seconds."""
    times = [end - start for start, end in zip((0.0, *ends), ends, strict=False)]
    usual = statistics.median(times[-LAST:])
    slow = [k for k, seconds in enumerate(times) if seconds > 2 * usual and seconds > usual + 0.05]
    return usual, ends[slow[-1]] if slow else 0.0


def count_apart(program: str, peer: str, device: str, seconds: float) -> list[float] | str:
    """As `count_here`, in a process of its own with empty caches; a line that says why if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.cold_start", "--child", program, peer]
        command += ["--device", device, "--seconds", str(seconds)]
        environment = os.environ | fresh_folders(Path(folder))
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["its process died"])[-1]
    return list(json.loads(done.stdout.splitlines()[-1]))


def measure(
    program: Program, peers: Sequence[str], device: str, seconds: Sequence[float]
) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    """Steps: 'after N s' -> peer -> one count; and notes with the time of a step before and after compiling."""
    samples: dict[str, dict[str, list[float]]] = {f"after {end:g} s": {} for end in seconds}
    notes: list[str] = []
    for peer in peers:
        ends = count_apart(program.name, peer, device, max(seconds))
        if isinstance(ends, str):
            notes.append(f"{program.name}: {peer} fails: {ends}")
            continue
        for end in seconds:
            samples[f"after {end:g} s"][peer] = [float(sum(moment <= end for moment in ends))]
        usual, since = ready(ends)
        notes.append(
            f"{program.name}: {peer}: first step {ends[0]:.2f} s, ready after {since:.1f} s, then {usual * 1e3:.1f} ms "
            f"a step"
        )
    return samples, notes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cold-start",
        description="Training steps done some seconds after the first began, from empty caches.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="the real device")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), help="such as: eager 'compile regional' tarry")
    parser.add_argument("--program", nargs="+", default=["GPT 4x128 8x64 AdamW"], choices=list(KNOWN), metavar="NAME")
    parser.add_argument("--seconds", nargs="+", type=float, default=list(SECONDS), help="when steps are counted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every count there")
    parser.add_argument("--child", nargs=2, metavar=("PROGRAM", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        name, peer = options.child
        print(json.dumps(count_here(KNOWN[name], peer, options.device, max(options.seconds))))
        return 0
    everything: dict[str, dict[str, list[float]]] = {}
    for name in options.program:
        samples, notes = measure(KNOWN[name], options.peers, options.device, options.seconds)
        title = f"steps of {name} from a cold start, torch {torch.__version__}, {torch.get_num_threads()} threads"
        show(title, samples, options.peers, "steps", notes)
        everything |= {f"{name}, {case}": row for case, row in samples.items()}
        if options.json:
            settings = {key: str(value) for key, value in vars(options).items() if key != "json"}
            write_json(options.json, "cold_start", "steps", everything, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
