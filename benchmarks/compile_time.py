"""What compiling a GPT costs by its depth: three training steps from empty caches, and a step once all is compiled.

    python -m benchmarks compile-time [--layers 2 4 8 16] [--peers pieces whole regional]

`pieces` is tarry, which compiles layers that repeat once; `whole` the same with `compile_pieces` off; `regional` is
PyTorch's own `block.compile()` for each block, with the optimizer as it is. Processor time, of the compilers as well,
is what a busy machine can measure; with one thread, and nothing beside the step. Each is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.first_step import fresh_folders
from benchmarks.programs import DEPTHS

PEERS = ("pieces", "whole", "regional")
FIRST_STEPS = 3  # the first makes the optimizer's state, the third is the first that finds all compiled
STEPS = 40
COLUMNS = ("compile, CPU s", "compile, wall s", "step, CPU ms")


def processor_time() -> float:
    """Seconds of this process and of the compilers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def step_of(peer: str, layers: int) -> Callable[[], Tensor]:
    """A training step, computed when the function returns; nothing is compiled yet."""
    torch.set_num_threads(1)
    device = "cpu" if peer == "regional" else "tarry"
    if device == "tarry":
        import tarry

        tarry.set_backend("inductor", compile="wait")
        tarry.config.run_ahead = False
        tarry.config.compile_pieces = peer == "pieces"
    torch.manual_seed(0)
    program = next(each for each in DEPTHS if each.name == f"GPT by depth {layers}")
    model = program.model().to(device)
    if peer == "regional":
        for block in model.get_submodule("blocks").children():
            block.compile()
    optimizer = program.optimizer(model)
    tokens, targets = (tensor.to(device) for tensor in program.batch())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = program.loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def measure_here(peer: str, layers: int) -> list[float]:
    step = step_of(peer, layers)
    wall, used = time.perf_counter(), processor_time()
    for _ in range(FIRST_STEPS):
        step().item()
    wall, used = time.perf_counter() - wall, processor_time() - used
    steps = []
    for _ in range(STEPS):
        begin = time.process_time()
        step().item()
        steps.append(time.process_time() - begin)
    return [used, wall, 1e3 * min(steps)]


def measure_apart(peer: str, layers: int) -> list[float] | str:
    """As `measure_here`, in a process of its own; a line that says why if it fails."""
    command = [sys.executable, "-m", "benchmarks.compile_time", "--child", peer, str(layers)]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | fresh_folders(Path(folder)) | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["its process died"])[-1]
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compile-time",
        description="What compiling a GPT costs by its depth.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--child", nargs=2, metavar=("PEER", "LAYERS"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(measure_here(options.child[0], int(options.child[1]))))
        return 0
    print(f"| layers | | {' | '.join(COLUMNS)} |\n| ---: | --- | {'---: | ' * len(COLUMNS)}")
    found = {}
    for layers in options.layers:
        for peer in options.peers:
            figures = found[f"{peer} {layers}"] = measure_apart(peer, layers)
            cells = figures if isinstance(figures, str) else " | ".join(f"{figure:.1f}" for figure in figures)
            print(f"| {layers} | {peer} | {cells} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"columns": COLUMNS, "figures": found}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
