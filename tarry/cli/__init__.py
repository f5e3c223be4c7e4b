"""The `tarry` command: `run`, `report`, `demo`, `doctor`, `bench`.

This module parses arguments and nothing more: each command lives in a module of its own that is imported when it
runs, so that `--help` answers at once and does not need torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 if all is well, 1 if not, 2 for wrong arguments."""
    options, rest = _parser().parse_known_args(argv)
    if options.command == "run" and not (options.script or options.module):
        _parser().error("run: give a script, or -m and a module")
    if options.command == "bench" and options.quick and options.name != "all":
        _parser().error("bench: --quick is for all benchmarks together; the options of one: tarry bench NAME -- --help")
    if rest and options.command != "bench":
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return _run(options, rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ImportError as error:
        from tarry.errors import NativeBuildError

        if not isinstance(error, NativeBuildError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    match options.command:
        case "run":
            from tarry.cli.run import run

            return run(options)
        case "report":
            from tarry.cli.report import report

            return report(options.files, options.output, options.open)
        case "demo":
            from tarry.cli.demo import demo

            return demo(
                steps=options.steps,
                device=options.device,
                backend=options.backend,
                seed=options.seed,
                quiet=options.quiet,
            )
        case "doctor":
            from tarry.cli.doctor import doctor

            return doctor()
        case "bench":
            from tarry.cli.bench import bench

            return bench(options.name, [*(["--quick"] if options.quick else []), *rest])
        case unknown:
            raise AssertionError(unknown)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tarry",
        description="tarry, a lazy-tensor runtime for PyTorch: try it, check the installation, measure it.",
        epilog="Each command has a --help of its own: tarry demo --help.",
    )
    parser.add_argument("--version", action="version", version=f"tarry {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    _add_run(commands)
    _add_report(commands)
    demo = commands.add_parser(
        "demo",
        help="train a small language model in eager PyTorch, with torch.compile and on tarry, and compare",
        description="Runs tarry/examples/train_gpt.py, an ordinary training script, in eager PyTorch, with "
        "torch.compile (from 100 steps on) and with device='tarry'. Prints the time of a step in each, whether the "
        "losses agree (exit status 1 if they do not), when tarry's program took over, and what tarry recorded, "
        "compiled and found on disk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--steps", type=_positive, default=300, metavar="N", help="training steps in each mode")
    demo.add_argument("--device", default="cpu", help="the real device that does the work: cpu, cuda, cuda:1")
    demo.add_argument("--backend", metavar="NAME", help="tarry's backend (default: the best that works here)")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the weights and the batches")
    demo.add_argument("--quiet", action="store_true", help="one line of result instead of progress and a table")

    commands.add_parser(
        "doctor",
        help="check the installation and say what to do about what is wrong",
        description="Checks Python, torch, the compiler, the native part, the backends, and adds two numbers on the "
        "device 'tarry'. Exit status 1 if something must be mended; each such line says how.",
    )

    bench = commands.add_parser(
        "bench",
        help="measure against eager PyTorch, torch.compile and the Lazy Tensor Core",
        description="Runs a benchmark of the checkout's folder benchmarks/; its own options follow the name. Without a "
        "name, all that docs/performance.md shows.",
        epilog="For a benchmark's own options: tarry bench record -- --help; of all: tarry bench all -- --help",
    )
    bench.add_argument(
        "--quick",
        action="store_true",
        help="a short look: of all that is measured without a name, the smallest program and few rounds (minutes "
        "instead of an hour)",
    )
    bench.add_argument(
        "name",
        nargs="?",
        choices=("all", "record", "training", "first-step", "cold-start", "generation", "memory", "custom-ops"),
        default="all",
        help="which benchmark (default: all)",
    )
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a script that was written for cuda or the CPU, as it is",
        description='Runs a script that was written for "cuda" or for the CPU on tarry, without a change to it: what '
        "it puts on that device is recorded and compiled a step at a time. Options of tarry come before the script, "
        "those of the script after it. A summary follows on stderr: steps, compiles, what was waited for, and what to "
        "do about it. The exit status is the script's.",
        usage="tarry run [options] script.py ... | tarry run [options] -m module ...",
    )
    run.add_argument(
        "--from",
        dest="source",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help='the device that the script was written for: "cuda"; or "cpu", also if it names none; auto (the default): '
        '"cuda" if its text has the word, or leaves the choice to torch.accelerator, a Trainer, an Accelerator or '
        "Lightning",
    )
    run.add_argument("--backend", metavar="NAME", help="what compiles the steps (default: the best that works here)")
    run.add_argument(
        "--device",
        help="the real device: cpu, cuda, cuda:1 (default: cuda, if it is there and the script was written for it)",
    )
    run.add_argument(
        "--compile",
        choices=("wait", "background", "never"),
        help="what a step does that is not compiled yet (default: what the backend prefers)",
    )
    run.add_argument(
        "--compare-eager",
        type=_positive,
        metavar="N",
        help="first run the script in eager PyTorch, in a process of its own, up to its N-th optimizer.step(), and "
        "compare losses and times. What it writes by then, it writes twice; seeds are set for both",
    )
    run.add_argument(
        "--report",
        metavar="FILE.html",
        help="record what happens, and make a page of it: what to change first, a timeline, the graphs, costs by line. "
        "Its events are written to FILE.json meanwhile (see tarry report --help)",
    )
    run.add_argument("--quiet", action="store_true", help="no summary, and no progress of compiles")
    run.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, as python -m")
    run.add_argument("script", nargs="?", help="the script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="make a page of what a run did: what to change first, timeline, graphs, costs by line, memory",
        description="Makes one HTML page, which needs nothing else, from a file of events, and prints the verdict.\n"
        "Such files are written, beside a page, by `tarry run --report out.html script.py` and by\n"
        "tarry.report('out.html') in a program; that of a process that was killed is as good as any.",
        epilog="examples:\n"
        "  tarry report out.json                   the page of one run, out.html\n"
        "  tarry report before.json after.json     two runs, compared\n"
        "  tarry report out.rank*.json             the ranks of one run, side by side",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("files", nargs="+", metavar="events.json", help="files of events")
    report.add_argument("-o", "--output", metavar="FILE.html", help="the page (default: beside the first file)")
    report.add_argument("--open", action="store_true", help="show the page in a browser")


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("tarry")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
