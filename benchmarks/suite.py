"""Everything that docs/performance.md shows, in one command.

    python -m benchmarks                               # CPU, and CUDA where there is a device
    python -m benchmarks --quick                       # a short look
    python -m benchmarks --device cuda --json out.json --plot out.svg
    python -m benchmarks render out.json [--into docs/performance.md] [--plot out.svg]

TRAINING_TARGETS and FIRST_STEP_TARGETS have what is required of each row. A peer that fails, or is not there, is a
line in the notes. The JSON file is written after every row, so that a run that is broken off has left what it had.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import first_step, memory, training_step
from benchmarks._peers import named
from benchmarks._plot import plot
from benchmarks._results import Results, Row, Target, markdown, row_of, show_section
from benchmarks.programs import GPT2, MEMORY_PROGRAMS, PROGRAMS, Program

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
REDUCE = "compile reduce-overhead"
PEERS = {
    "cpu": ("eager", "LTC", "compile", "tarry eager", "tarry torchscript", "tarry inductor", "tarry.compile"),
    "cuda": ("eager", "compile", REDUCE, "tarry inductor", "tarry.compile"),
}
MLP, GPT, RESNET = (program.name for program in PROGRAMS)
GENERATE = ("GPT by hand", "gpt2", "llama", "opt")  # `python -m benchmarks generation` has more models
RECORDED, REPLAYED = ("tarry inductor",), ("tarry.compile",)


def _training_targets(reference: str, asked: dict[str, tuple[float, float]]) -> dict[str, tuple[Target, ...]]:
    """Of each program: what a recorded and what a replayed step may take of the reference's time."""
    return {
        name: (Target(RECORDED, reference, recorded), Target(REPLAYED, reference, replayed))
        for name, (recorded, replayed) in asked.items()
    }


TRAINING_TARGETS = {
    "one thread": _training_targets("compile", {MLP: (0.85, 0.35), GPT: (0.85, 0.85), RESNET: (0.85, 0.85)}),
    "all cores": _training_targets("compile", {MLP: (0.9, 0.4), GPT: (0.9, 0.85), RESNET: (0.9, 0.85)}),
    "cuda": _training_targets(REDUCE, {MLP: (0.6, 0.6), GPT: (0.9, 0.9), RESNET: (0.8, 0.8), GPT2.name: (0.8, 0.8)}),
}
FIRST_STEP_TARGETS = {
    first_step.FIRST: (Target(("tarry",), "eager", 3.0),),
    first_step.SECOND: (Target(("tarry",), "eager", 1.0, difference=True),),
}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    devices: tuple[str, ...]
    sections: tuple[str, ...]
    rounds: int
    quick: bool

    def programs(self, device: str) -> tuple[Program, ...]:
        chosen = PROGRAMS[:1] if self.quick else PROGRAMS
        return (*chosen, GPT2) if device == "cuda" else chosen

    def threads(self, device: str) -> dict[str, int]:
        """How many threads compute, by the names in TRAINING_TARGETS: one, and as many as PyTorch takes by itself."""
        if device == "cuda":
            return {"cuda": 1}
        return {"one thread": 1} | ({} if self.quick else {"all cores": torch.get_num_threads()})

    def memory_programs(self, device: str) -> tuple[Program, ...]:
        if device == "cuda":
            return self.programs(device)
        return PROGRAMS[:1] if self.quick else MEMORY_PROGRAMS


Section = Iterator[tuple[Row, list[str]]]  # each row as soon as it is there, with notes


def training(plan: Plan) -> Section:
    for device in plan.devices:
        for program in plan.programs(device):
            for case, threads in plan.threads(device).items():
                peers = [named(name, device) for name in PEERS[device]]
                samples, notes = training_step.measure(program, peers, 10, plan.rounds, None, threads=threads)
                section = f"training step on {device}" + (f", {case}" if device == "cpu" else "")
                row = row_of(section, program.name, "ms", samples)
                yield row.judge(TRAINING_TARGETS[case].get(program.name, ())), notes


def first_steps(plan: Plan) -> Section:
    if "cpu" not in plan.devices:
        return
    program = PROGRAMS[0] if plan.quick else PROGRAMS[1]
    samples, notes = first_step.measure(program, first_step.PEERS, "cpu", 1)
    for case, times in samples.items():
        row = row_of("first step on cpu", f"{program.name}, {case}", "s", times)
        yield row.judge(FIRST_STEP_TARGETS[case]), notes
        notes = []


def generation(plan: Plan) -> Section:
    """The median over some models of benchmarks/generation.py, which is a command of its own."""
    if "cpu" not in plan.devices:
        return
    if importlib.util.find_spec("benchmarks.generation") is None:
        yield Row("generation on cpu", "cold", "of eager's", {}), ["generation: there is no benchmarks/generation.py"]
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "generation.json"
        rounds, models = ("1", GENERATE[:1]) if plan.quick else ("3", GENERATE)
        command = [sys.executable, "-m", "benchmarks", "generation", "--json", str(path), "--rounds", rounds]
        done = subprocess.run([*command, "--only", *models], capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it failed"])[-1]
            yield Row("generation on cpu", "cold", "of eager's", {}), [f"generation: {said}"]
            return
        medians: dict[str, dict[str, float]] = json.loads(path.read_text())["medians"]
    for phase in ("cold", "again", "later"):
        rows = [row for case, row in medians.items() if case.endswith(f", {phase}") and row.get("eager")]
        peers = dict.fromkeys(peer for row in rows for peer in row)
        ratios = {peer: [row[peer] / row["eager"] for row in rows if peer in row] for peer in peers}
        middles = {peer: statistics.median(found) for peer, found in ratios.items()}
        row = Row("generation on cpu", phase, "of eager's", middles)
        targets = [Target((peer,), "eager", 1.5) for peer in peers if peer != "eager"] if phase == "cold" else []
        yield row.judge(targets), []


def peaks(plan: Plan) -> Section:
    for device in plan.devices:
        backends = ("inductor",) if device == "cuda" else ("eager", "torchscript", "inductor")
        peers = ["eager", *(f"tarry {name}" for name in backends)]
        for program in plan.memory_programs(device):
            results, notes = memory.collect([program], peers, device)
            values = {peer: found["tensors"] / 1e6 for peer, found in results[program.name].items()}
            row = Row(f"peak memory of a step on {device}", program.name, "MB", values)
            yield row.judge([Target((peer,), "eager", 1.0) for peer in peers[1:]]), notes


SECTIONS: dict[str, Callable[[Plan], Section]] = {
    "training": training,
    "first-step": first_steps,
    "generation": generation,
    "memory": peaks,
}


class Progress:
    """Where a run is, on stderr: a status in a terminal, a line for each row in a log."""

    def __init__(self, sections: int) -> None:
        self._sections, self._section, self._name = sections, 0, ""
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("")
        self._start = time.perf_counter()

    def begin(self, section: str) -> None:
        self._section, self._name = self._section + 1, section
        self._status.update(f"{self._where()}: {section}")
        self._status.start()

    def row(self, row: Row) -> None:
        self._console.print(f"{self._where()}: {self._name}: {row.work} done", markup=False)

    def end(self) -> None:
        self._status.stop()

    def _where(self) -> str:
        return f"{self._section}/{self._sections}, {time.perf_counter() - self._start:.0f} s"


def run(plan: Plan, path: Path | None) -> Results:
    """Measure, showing each section when it is done and writing it down as soon as there is something."""
    results = Results.here()
    progress = Progress(len(plan.sections))
    for name in plan.sections:
        before = len(results.rows)
        progress.begin(name)
        for row, notes in SECTIONS[name](plan):
            progress.row(row)
            results.notes += notes
            if row.values:
                results.rows.append(row)
            if path is not None:
                results.write(path)
        by_title: dict[str, list[Row]] = {}
        progress.end()
        for row in results.rows[before:]:
            by_title.setdefault(row.section, []).append(row)
        for title, rows in by_title.items():
            show_section(title, rows)
            print(flush=True)
    for note in results.notes:
        print(note)
    verdicts = [verdict for row in results.rows for verdict in row.verdicts]
    print(f"{sum(verdict.met for verdict in verdicts)} of {len(verdicts)} targets met")
    return results


def render(argv: Sequence[str]) -> int:
    """`python -m benchmarks render FILE`: a file of results as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks render", description="Results as Markdown.")
    parser.add_argument("files", nargs="+", type=Path, help="what --json has written; several follow one another")
    parser.add_argument("--into", type=Path, metavar="FILE", help=f"put it between {BEGIN} and {END} there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the first file as SVG")
    options = parser.parse_args(argv)
    found = [Results.read(path) for path in options.files]
    text = "\n".join(markdown(results) for results in found)
    if options.into is None:
        print(text)
    else:
        page = options.into.read_text()
        head, begin, rest = page.partition(BEGIN)
        _, end, tail = rest.partition(END)
        if not begin or not end:
            print(f"error: {options.into} has no lines {BEGIN} and {END}", file=sys.stderr)
            return 1
        options.into.write_text(f"{head}{BEGIN}\n{text}{END}{tail}")
    if options.plot:
        plot(found[0], options.plot)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="All measurements of docs/performance.md: training steps, first steps, generation, memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "all"), default="all", help="all: those that are here")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=list(SECTIONS), help="sections")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the training steps")
    parser.add_argument("--quick", action="store_true", help="the smallest program and few rounds: a short look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there, as SVG")
    options = parser.parse_args(argv)
    here = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    devices = here if options.device == "all" else (options.device,)
    if not set(devices) <= set(here):
        print(f"error: --device {options.device}: torch sees no CUDA device here", file=sys.stderr)
        return 2
    rounds = min(options.rounds, 5) if options.quick else options.rounds
    plan = Plan(devices, tuple(options.only), rounds, options.quick)
    results = run(plan, options.json)
    if options.plot:
        plot(results, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
