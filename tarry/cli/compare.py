"""`tarry run --compare-eager N`: the first N steps in eager PyTorch as well, in a process of its own.

Both processes seed all generators before the script begins, and note the loss (what `backward()` is called on) and the
time of each step. The eager one does not register the device "tarry" unless it has to: eager CUDA training fails where
it is (PyTorch issue 161129).
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tarry.cli.script import Script
from tarry.cli.script import run as run_script
from tarry.events.text import duration

if TYPE_CHECKING:
    from rich.console import Console

_EAGER = (
    "import sys, tarry_command; tarry_command.defer_package(); from tarry.cli.compare import main; "
    "raise SystemExit(main(sys.argv[1:]))"
)
TOLERANCE = 1e-3
"""Relative difference of two losses that is put down to rounding: compilers add in another order, and training makes
more of a difference with each step."""


@dataclass
class Losses:
    """Loss and time of each of the first steps."""

    wanted: int
    values: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    _pending: list[Any] = field(default_factory=list)
    _last: float = field(default_factory=time.perf_counter)

    def watch(self, done: Any = None) -> None:
        """Begin: seed, and note what `backward()` is called on. `done()` is called after the last step."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _seed()
        original, cpu = torch.Tensor.backward, torch.Tensor.cpu

        @functools.wraps(original)
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if len(self.values) < self.wanted:
                self._pending.append(tensor.detach())
            return original(tensor, *args, **kwargs)

        def end_step(*_: Any) -> None:
            if len(self.values) >= self.wanted:
                return
            # After the step is cut, so that reading a loss does not cut it in two.
            read = [float(cpu(loss).double().sum()) for loss in self._pending]
            self._pending.clear()
            self.values.append(statistics.fmean(read) if read else math.nan)
            now = time.perf_counter()
            self.seconds.append(now - self._last)
            self._last = time.perf_counter()
            if len(self.values) == self.wanted and done is not None:
                done()

        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]
        register_optimizer_step_post_hook(end_step)


def _seed() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)


def run_eagerly(script: Script, source: str, device: str, steps: int, console: Console) -> Losses:
    """Run the script in eager PyTorch up to its N-th step; what it says is thrown away."""
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        path = Path(folder) / "losses.json"
        status.update(f"the first {steps} steps in eager PyTorch")
        command = [sys.executable, "-c", _EAGER, str(path), str(steps), source, device, *script.command]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if not path.exists():
            said = "\n".join(done.stderr.strip().splitlines()[-8:])
            console.print(f"in eager PyTorch, the script failed before its first step:\n{said}", markup=False)
            return Losses(0)
        return Losses(steps, **json.loads(path.read_text()))


def comparison(eager: Losses, lazy: Losses) -> Table:
    """Losses and times side by side."""
    count = min(len(eager.values), len(lazy.values))
    table = Table(title=f"the first {count} steps", title_justify="left")
    for column in ("step", "loss eager", "loss tarry", "ms eager", "ms tarry"):
        table.add_column(column, justify="right")
    shown = range(count) if count <= 10 else [*range(5), *range(count - 5, count)]
    for k in shown:
        losses = [f"{run.values[k]:.6g}" for run in (eager, lazy)]
        times = [f"{run.seconds[k] * 1e3:.1f}" for run in (eager, lazy)]
        table.add_row(str(k + 1), *losses, *times)
    return table


def verdict(eager: Losses, lazy: Losses) -> str:
    """Whether the two have the same losses, and which was faster."""
    pairs = list(zip(eager.values, lazy.values, strict=False))
    if not pairs:
        return "nothing to compare: no optimizer.step() in both"
    differences = [_difference(a, b) for a, b in pairs]
    worst = max(differences)
    if worst <= TOLERANCE:
        said = f"the losses are the same (they differ by {worst:.1g} at most)"
    else:
        first = next(k for k, each in enumerate(differences) if each > TOLERANCE)
        said = f"the losses DIFFER from step {first + 1} on, by up to {worst:.1g} of their value"
    middles = [statistics.median(run.seconds[1:] or run.seconds) for run in (eager, lazy)]
    return f"{said}; a step took {duration(middles[0])} in eager PyTorch and {duration(middles[1])} on tarry"


def _difference(a: float, b: float) -> float:
    if (math.isnan(a) and math.isnan(b)) or a == b:
        return 0.0
    difference = abs(a - b) / max(abs(a), abs(b), 1e-9)
    return math.inf if math.isnan(difference) else difference


def main(arguments: list[str]) -> int:
    """The eager process: PATH STEPS SOURCE DEVICE [-m] SCRIPT ..."""
    path, steps, source, device, *command = arguments
    is_module = command[0] == "-m"
    name, *rest = command[is_module:]
    losses = Losses(int(steps))

    def write() -> None:
        if losses.values:
            Path(path).write_text(json.dumps({"values": losses.values, "seconds": losses.seconds}))

    def stop() -> None:
        write()
        os._exit(0)

    losses.watch(stop)
    stack = ExitStack()
    atexit.register(stack.close)
    if source == "cuda" and not device.startswith("cuda"):
        import tarry

        tarry.get_backend  # noqa: B018 - the first name that is asked for registers the device (tarry_command.py)
        from tarry.lazy.devices import Devices
        from tarry.lazy.mode import replacing

        stack.enter_context(replacing(Devices("cuda", "cpu")))
    return run_script(Script(name, is_module, tuple(rest)), lambda: None, write)
