"""`tarry demo`: the same training run in eager PyTorch and on tarry, side by side."""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tarry.cli.demo_model import GPT, Batches, GPTConfig, text
from tarry.native._build import TARRY, build

BATCH = 8
LEARNING_RATE = 3e-3
WARM_UP = 3  # steps left out of the median: the first ones create optimizer state and compile
# Two runs that only differ in the order of floating-point sums drift apart slowly; a wrong operator does not.
TOLERANCE = 1e-2


@dataclass
class Run:
    """What one training run gave."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        return statistics.median(self.seconds[WARM_UP:] or self.seconds) * 1e3

    @property
    def first_ms(self) -> float:
        return self.seconds[0] * 1e3


def train(model: GPT, batches: Batches, device: str, steps: int, report: Callable[[float], None]) -> Run:
    """An ordinary PyTorch training loop. Nothing in it is for tarry: `device` is the only difference."""
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps, eta_min=LEARNING_RATE / 10)
    run = Run()
    for _ in range(steps):
        inputs, targets = batches.next()
        begin = time.perf_counter()
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - begin)
        report(run.losses[-1])
    return run


def demo(*, steps: int, device: str, backend: str | None, seed: int, quiet: bool) -> int:
    """Train in both modes and print the comparison; 0 if the losses agree."""
    problem = _problem(device, backend)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    build(TARRY)  # here rather than at the import, which may come in the middle of a progress bar
    torch.set_num_threads(1)  # the model is too small to gain from more, and on a busy machine they wait for each other
    corpus = text(seed)
    start = Batches(corpus, size=BATCH, context=GPTConfig.context, seed=seed)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocabulary=start.vocabulary))
    console = Console(quiet=quiet)
    console.print(
        f"A GPT of {sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps of AdamW on a made-up text "
        f"of {len(corpus):,} letters; torch {torch.__version__}, real device {device}, "
        f"backend {backend or 'the best that works here'}."
    )
    progress = Progress(
        TextColumn("{task.description:>14}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}  loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        console=console,
        disable=quiet,
    )
    with progress:

        def go(name: str, where: str) -> Run:
            task = progress.add_task(name, total=steps, loss=float("nan"))
            return train(
                copy.deepcopy(model),
                copy.deepcopy(start),
                where,
                steps,
                lambda loss: progress.update(task, advance=1, loss=loss),
            )

        on_cuda = device.startswith("cuda")
        if not on_cuda:
            _start(backend, device)
        eager = go(f"eager on {device}", device)
        if on_cuda:
            _start(backend, device)
        import tarry

        tarry.metrics.reset()
        lazy = go("tarry", "tarry")
        counters = tarry.metrics.counters()
    differences = [abs(a - b) / max(abs(a), 1e-9) for a, b in zip(eager.losses, lazy.losses, strict=True)]
    difference = max(differences, key=lambda value: math.inf if math.isnan(value) else value)
    agree = difference <= TOLERANCE
    if quiet:
        print(
            f"loss {eager.losses[-1]:.4f} eager, {lazy.losses[-1]:.4f} tarry, {'match' if agree else 'DIFFER'}; "
            f"ms per step {eager.step_ms:.2f} eager, {lazy.step_ms:.2f} tarry"
        )
    else:
        console.print(comparison(eager, lazy, difference, agree))
        console.print(work(counters, steps, tarry.get_backend().name))
    return 0 if agree else 1


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
    if "tarry.native._tarry_native" in sys.modules:
        return "with a CUDA device, start the demo with the command `tarry demo`, not with `python -m tarry demo`"
    return ""


def comparison(eager: Run, lazy: Run, difference: float, agree: bool) -> Table:
    table = Table(title="the same run twice", title_justify="left")
    for column in ("", "eager", "tarry", ""):
        table.add_column(column, justify="right" if column else "left")
    verdict = "[green]match[/]" if agree else "[red]differ[/]"
    table.add_row("first loss", f"{eager.losses[0]:.4f}", f"{lazy.losses[0]:.4f}", "")
    table.add_row(
        "final loss",
        f"{eager.losses[-1]:.4f}",
        f"{lazy.losses[-1]:.4f}",
        f"{verdict} (largest relative difference of any step {difference:.1e})",
    )
    ratio = lazy.step_ms / eager.step_ms
    table.add_row("time per step, ms", f"{eager.step_ms:.2f}", f"{lazy.step_ms:.2f}", f"{ratio:.2f} times eager's")
    table.add_row("first step, ms", f"{eager.first_ms:.1f}", f"{lazy.first_ms:.1f}", "")
    slowest = max(lazy.seconds)
    table.add_row("longest step, ms", f"{max(eager.seconds) * 1e3:.1f}", f"{slowest * 1e3:.1f}", "with compilation")
    return table


def work(counters: Mapping[str, float], steps: int, backend: str) -> Table:
    """What tarry did, from its counters."""
    fallbacks = {name.removeprefix("fallback/"): n for name, n in counters.items() if name.startswith("fallback/")}
    names = ", ".join(sorted(fallbacks)) or "every operator was recorded"
    table = Table(title=f"what tarry did in {steps} steps", title_justify="left")
    for column in ("", "count", "per step", ""):
        table.add_column(column, justify="right" if column in ("count", "per step") else "left")
    for name, count, meaning in (
        ("nodes recorded", counters.get("record", 0), "operators noted instead of run"),
        ("nodes re-used", counters.get("node_reuse", 0), "found as the step before left them"),
        ("syncs", counters.get("sync", 0), "graphs cut and run"),
        ("compiles", counters.get("compile", 0), f"programs made by {backend}"),
        ("cache hits", counters.get("cache_hit", 0), "graphs seen before"),
        ("fallbacks", sum(fallbacks.values()), names),
    ):
        table.add_row(name, f"{count:,}", f"{count / steps:,.1f}", meaning)
    return table
