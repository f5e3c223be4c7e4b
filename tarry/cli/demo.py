"""`tarry demo`: one training script in eager PyTorch, with torch.compile, and on tarry, side by side.

The script is `tarry/examples/train_gpt.py`, as it is; only its device differs, or its option --compile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tarry.cli.demo_report import Run, Work, compare, comparison, work_table
from tarry.examples import train_gpt
from tarry.native._build import TARRY, build

if TYPE_CHECKING:
    from tarry.events import Event

MAX_WAIT = 90.0  # seconds that the demo waits for a compiler that works in the background
WORTH_COMPILING = 100  # steps from which on torch.compile is shown, too: it takes half a minute before its first


@dataclass
class Bars:
    """A progress bar for each run."""

    progress: Progress
    steps: int
    tasks: dict[str, TaskID] = field(default_factory=dict)

    def train(self, name: str, settings: train_gpt.Settings) -> Run:
        """Run the script, with its progress on a bar of that name."""
        task = self.progress.add_task(name, total=self.steps, note="")
        run = Run(name)
        last = time.perf_counter()

        def log(step: int, loss: float, validation: float | None) -> None:
            nonlocal last
            now = time.perf_counter()
            run.losses.append(loss)
            if validation is None:  # a step after which a validation runs has another time
                run.seconds.append(now - last)
            else:
                run.validation.append(validation)
            last = now
            self.progress.update(task, advance=1, note=f"loss {loss:.3f}")

        train_gpt.train(settings, log)
        return run


def demo(*, steps: int, device: str, backend: str | None, seed: int, quiet: bool) -> int:
    """Train in both ways and print the comparison; 0 if the losses agree."""
    problem = _problem(device, backend)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    build(TARRY)  # here rather than at the import, which may come in the middle of a progress bar
    console = Console(quiet=quiet)
    settings = train_gpt.Settings(device, steps=steps, warm_up=steps // 10, validate_every=_half(steps), seed=seed)
    console.print(
        f"{train_gpt.__file__}\n{steps} steps of {settings.accumulate} batches, bf16 autocast, dropout, activation "
        f"checkpointing; torch {torch.__version__}, real device {device}, {_threads()}."
    )
    with _progress(console, quiet) as progress:
        bars = Bars(progress, steps)
        eager, compiled, lazy, work = _train_all(bars, settings, device, backend)
    difference = max(compare(eager, run) for run in lazy)
    agree = difference <= Run.TOLERANCE
    verdict = "match" if agree else "DIFFER"
    if quiet:
        print(
            f"loss {eager.end:.4f} eager, {lazy[-1].end:.4f} tarry, {verdict}; "
            f"ms per step {eager.step_ms:.2f} eager, {lazy[-1].step_ms:.2f} tarry"
        )
    else:
        console.print(comparison(eager, compiled, lazy, difference))
        console.print(work_table(work))
    return 0 if agree else 1


def _train_all(
    bars: Bars, settings: train_gpt.Settings, device: str, backend: str | None
) -> tuple[Run, Run | None, list[Run], Work]:
    """The run of eager, of torch.compile, those of tarry, and what tarry did. tarry has a second one if the first was
    over before the compiler."""
    on_cuda = device.startswith("cuda")
    if not on_cuda:
        _start(backend, device)
    eager = bars.train(f"eager on {device}", settings)
    compiled = None
    if settings.steps >= WORTH_COMPILING:
        compiled = bars.train("torch.compile", replace(settings, compile=True))
    if on_cuda:
        _start(backend, device)
    import tarry
    from tarry import events

    tarry.metrics.reset()
    seen: list[Event] = []
    on_tarry = replace(settings, device="tarry")
    with events.subscribe(seen.append):
        runs = [bars.train("tarry", on_tarry)]
        if Work(seen).reference_steps > settings.steps // 2 and _wait_for_compiler(bars):
            runs.append(bars.train("tarry, compiled", on_tarry))
    return (
        eager,
        compiled,
        runs,
        Work(seen, settings.steps * len(runs), tarry.metrics.counters(), tarry.get_backend().name),
    )


def _wait_for_compiler(bars: Bars) -> bool:
    """Whether a compiler that works in the background is done, after waiting for it a while."""
    import tarry

    task = bars.progress.add_task("compiling", total=None, note="in the background; the run above did not wait for it")
    done = tarry.wait_for_compiles(timeout=MAX_WAIT)
    bars.progress.update(task, total=1, completed=1, note="done" if done else "still not done")
    return done


@contextmanager
def _progress(console: Console, quiet: bool) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description:>15}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=quiet) as progress:
        yield progress


def _threads() -> str:
    count = torch.get_num_threads()
    return "one thread" if count == 1 else f"{count} threads"


def _half(steps: int) -> int:
    """How often a run is validated: twice, unless it is only a few steps long."""
    return steps // 2 if steps >= 20 else steps + 1


def _start(backend: str | None, device: str) -> None:
    """`import tarry`, at the right moment.

    Eager CUDA training fails in a process where any PrivateUse1 device is registered (PyTorch issue 161129), so there
    tarry must come after it. On the CPU it must come before: the first backward of a process fixes for how many
    devices the autograd engine has threads, and a device that is registered later has none.
    """
    import tarry

    tarry.set_backend(backend, device)


def _problem(device: str, backend: str | None) -> str:
    """Why the demo cannot run; empty if it can. Found out without `import tarry`: see _start."""
    from tarry.backends import registry
    from tarry.errors import BackendError

    try:
        if backend is not None:
            registry.find(backend)
    except BackendError as error:
        return str(error)
    if not device.startswith("cuda"):
        return ""
    if not torch.cuda.is_available():
        return f"--device {device}: torch sees no CUDA device here; use --device cpu"
    if "tarry.native._C" in sys.modules:
        return "with a CUDA device, start the demo with the command `tarry demo`, not with `python -m tarry demo`"
    return ""
