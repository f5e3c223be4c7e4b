"""Peak memory of a training step, against eager PyTorch.

    python -m benchmarks memory [--device cuda] [--backends eager torchscript inductor] [--json FILE]

On a CPU the C library's allocator is watched (`allocations.c`): every thread and every kernel is counted, exactly and
at every moment, and nothing depends on what the system does with freed pages. *Tensors* are the blocks that were asked
for with an alignment, which is how torch allocates its data; *all* adds everything else on the heap. On CUDA it is
torch.cuda's own peak, in steps among which some are captured as CUDA graphs: only then does the allocator see what
lives inside of a graph. What is counted is what lives at the worst moment of a step, weights and optimizer included.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._peers import Peer, named
from benchmarks.programs import ALL_PROGRAMS, MEMORY_PROGRAMS, Program
from benchmarks.training_step import Trainer

SOURCE = Path(__file__).with_name("allocations.c")
Peaks = dict[str, int]  # "tensors", and on a CPU "all": bytes
WARM_UP = 4  # steps: the second one is the first of the steady state, and is compiled
STEPS = 10


class Watch:
    """The peaks of this process since they were last reset."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._library = ctypes.CDLL(None)

    def reset(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._library.tarry_reset_peaks()

    def read(self) -> Peaks:
        if self._cuda:
            torch.cuda.synchronize()
            return {"tensors": torch.cuda.max_memory_allocated()}
        tensors, everything = ctypes.c_long(), ctypes.c_long()
        self._library.tarry_peaks(ctypes.byref(tensors), ctypes.byref(everything))
        return {"tensors": tensors.value, "all": everything.value}


def measure_here(program: Program, peer: Peer, device: str) -> Peaks:
    """Peaks of a step in the steady state, in this process."""
    torch.set_num_threads(1)
    peer.start()
    trainer = Trainer(program, peer, read_every=WARM_UP + 1 + STEPS)  # steps that are not read may overlap
    trainer.steps(WARM_UP)
    peer.ready()
    trainer.step()
    watch = Watch(device)
    watch.reset()
    trainer.steps(STEPS)
    return watch.read()


def measure(program: Program, peer: str, device: str, watch: Path | None) -> Peaks | str:
    """Peaks of a step, in a process of its own; a line that says why if there are none."""
    environment = dict(os.environ)
    if watch is not None:
        environment["LD_PRELOAD"] = f"{watch} {environment.get('LD_PRELOAD', '')}".strip()
    command = [sys.executable, "-m", "benchmarks.memory", "--child", program.name, peer, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["its process died"])[-1]
    peaks: Peaks = json.loads(done.stdout.splitlines()[-1])
    return peaks


def build_watch(folder: Path) -> Path:
    """The library that counts allocations, compiled."""
    library = folder / "allocations.so"
    subprocess.run(
        [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-lpthread"],
        check=True,
    )
    return library


Results = dict[str, dict[str, Peaks]]  # program -> peer -> peaks


def collect(programs: Sequence[Program], peers: Sequence[str], device: str) -> tuple[Results, list[str]]:
    """All peaks, and notes about peers that failed."""
    results: Results = {}
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        watch = None if device.startswith("cuda") else build_watch(Path(folder))
        for program in programs:
            row = results.setdefault(program.name, {})
            for peer in peers:
                peaks = measure(program, peer, device, watch)
                if isinstance(peaks, str):
                    notes.append(f"{program.name}: {peer} fails: {peaks}")
                else:
                    row[peer] = peaks
    return results, notes


def show(results: Results, peers: Sequence[str], device: str, notes: Sequence[str]) -> None:
    table = Table(title=f"peak memory of a training step on {device}, MB", title_justify="left", box=None)
    table.add_column("program", no_wrap=True)
    for peer in peers:
        table.add_column(f"{peer}", justify="right", no_wrap=True)
        if peer != "eager":
            table.add_column("/eager", justify="right", no_wrap=True)
    for name, row in results.items():
        for kind in ("tensors", "all"):
            if any(kind in peaks for peaks in row.values()):
                table.add_row(f"{name}, {kind}", *_cells(row, peers, kind))
    console = Console()
    console.print(table, soft_wrap=True)
    for note in notes:
        console.print(note, highlight=False)


def _cells(row: dict[str, Peaks], peers: Sequence[str], kind: str) -> list[str]:
    cells: list[str] = []
    base = row.get("eager", {}).get(kind)
    for peer in peers:
        bytes_ = row.get(peer, {}).get(kind)
        cells.append("-" if bytes_ is None else f"{bytes_ / 1e6:.2f}")
        if peer != "eager":
            cells.append("-" if bytes_ is None or not base else f"{bytes_ / base:.2f}")
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks memory",
        description="Peak memory of a training step on tarry, against eager PyTorch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="the real device")
    parser.add_argument("--backends", nargs="+", default=["eager", "torchscript", "inductor"], help="tarry's backends")
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--only", default="", metavar="WORD", help="programs with this word in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the peaks there")
    parser.add_argument("--child", nargs=2, metavar=("PROGRAM", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        program = ALL_PROGRAMS[options.child[0]]
        print(json.dumps(measure_here(program, named(options.child[1], options.device), options.device)))
        return 0
    programs = [program for program in MEMORY_PROGRAMS if options.only.lower() in program.name.lower()]
    if not programs:
        print(f"no program has {options.only!r} in its name: {[p.name for p in MEMORY_PROGRAMS]}", file=sys.stderr)
        return 2
    peers = ["eager", *(["compile"] if options.compile else []), *(f"tarry {name}" for name in options.backends)]
    results, notes = collect(programs, peers, options.device)
    show(results, peers, options.device, notes)
    if options.json:
        summary: dict[str, Any] = {"benchmark": "memory", "unit": "bytes", "device": options.device}
        options.json.write_text(json.dumps({**summary, "torch": torch.__version__, "peaks": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
