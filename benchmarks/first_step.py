"""The first step of a training program, with empty caches and in a second process that finds what the first one left.

    python -m benchmarks first-step [--json FILE]

Each peer is a fresh process with folders of its own for what is compiled, so nothing of the user's is found or changed.
What is timed is the first step, its loss read; not the imports, and not making the model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks._peers import named
from benchmarks._report import show, write_json
from benchmarks.programs import ALL_PROGRAMS, Program
from benchmarks.training_step import Trainer

PEERS = ("eager", "compile", "tarry")
FIRST, SECOND = "cold cache", "second process"
STEPS = 8  # after the first, so that what comes round again is compiled and kept for the second process


def copy_installation(own: Path) -> None:
    """Copy what an installation builds once into a cache of its own (links are not trusted): the native part, and the
    tables of operators and nodes, but no programs."""
    from tarry.config import config
    from tarry.native import C

    library = Path(str(C.__file__)).parent
    if not (own / library.parent.name / library.name).exists():
        shutil.copytree(library, own / library.parent.name / library.name)
    for entry in config.cache_dir.iterdir():
        if entry.name in ("programs", "objects", library.parent.name) or (own / entry.name).exists():
            continue
        (shutil.copytree if entry.is_dir() else shutil.copy2)(entry, own / entry.name)


def fresh_folders(folder: Path) -> dict[str, str]:
    """Environment variables that give a process caches of its own: empty, but for what an installation builds once."""
    own = folder / "tarry"
    own.mkdir()
    copy_installation(own)
    return {"TARRY_CACHE_DIR": str(own), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def time_here(program: Program, peer_name: str, device: str) -> float:
    """Seconds of the first step in this process; more steps follow, so that all is compiled at the end."""
    torch.set_num_threads(1)
    peer = named(peer_name, device)
    peer.start()
    trainer = Trainer(program, peer)
    peer.cut()
    begin = time.perf_counter()
    trainer.step()
    seconds = time.perf_counter() - begin
    for _ in range(STEPS):
        trainer.step()
    peer.ready()
    return seconds


def time_apart(program: str, peer: str, device: str, environment: dict[str, str]) -> float | str:
    """As `time_here`, in a process of its own; a line that says why if it fails."""
    command = [sys.executable, "-m", "benchmarks.first_step", "--child", program, peer, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["its process died"])[-1]
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure(
    program: Program, peers: Sequence[str], device: str, rounds: int
) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    """Seconds: `FIRST` and `SECOND` -> peer -> one per round."""
    samples: dict[str, dict[str, list[float]]] = {case: {peer: [] for peer in peers} for case in (FIRST, SECOND)}
    notes: list[str] = []
    for _ in range(rounds):
        for peer in peers:
            with tempfile.TemporaryDirectory() as folder:
                environment = fresh_folders(Path(folder))
                for case in (FIRST, SECOND):
                    seconds = time_apart(program.name, peer, device, environment)
                    if isinstance(seconds, str):
                        notes.append(f"{program.name}, {case}: {peer} fails: {seconds}")
                    else:
                        samples[case][peer].append(seconds)
    return samples, notes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks first-step",
        description="Seconds of the first training step, with empty caches and in a second process.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=1, help="pairs of processes for each peer")
    parser.add_argument("--device", default="cpu", help="the real device")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), help="such as: eager compile 'tarry inductor'")
    parser.add_argument("--program", default="GPT 4x128 8x64 AdamW", choices=list(ALL_PROGRAMS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument("--child", nargs=2, metavar=("PROGRAM", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(time_here(ALL_PROGRAMS[options.child[0]], options.child[1], options.device)))
        return 0
    samples, notes = measure(ALL_PROGRAMS[options.program], options.peers, options.device, options.rounds)
    show(f"first step of {options.program}, torch {torch.__version__}", samples, options.peers, "s", notes)
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        write_json(options.json, "first_step", "s", samples, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
