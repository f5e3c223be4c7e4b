"""`tarry run`: an unmodified script on tarry, with a summary of what happened at its end."""

from __future__ import annotations

import argparse
import os
import re
import sys
from contextlib import ExitStack
from typing import Literal, cast

from rich.console import Console

from tarry.cli.script import Script
from tarry.cli.script import run as run_script


def _script(options: argparse.Namespace) -> Script:
    if options.module is not None:
        return Script(options.module[0], True, tuple(options.module[1:]))
    return Script(options.script, False, tuple(options.arguments))


def _source(options: argparse.Namespace, script: Script) -> Literal["cuda", "cpu"]:
    """The device that the script was written for."""
    if options.source != "auto":
        return cast("Literal['cuda', 'cpu']", options.source)
    return "cuda" if re.search(r"\bcuda\b", script.text()) else "cpu"


def run(options: argparse.Namespace) -> int:
    """Run a script on tarry; the exit status is the script's own."""
    script = _script(options)
    source = _source(options, script)
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    device = options.device or os.environ.get("TARRY_DEVICE")
    if device is None and source == "cuda" and torch.cuda.is_available():
        device = "cuda"
    console = Console(stderr=True, highlight=False, quiet=options.quiet)
    eager = None
    if options.compare_eager:
        from tarry.cli.compare import run_eagerly

        eager = run_eagerly(script, source, device or "cpu", options.compare_eager, console)
    import tarry
    from tarry import events, places
    from tarry.cli.progress import CompileProgress
    from tarry.cli.summary import summary
    from tarry.cli.watch import Watch, watch_reads
    from tarry.errors import BackendError
    from tarry.lazy.devices import Devices
    from tarry.lazy.mode import replacing

    try:
        if options.backend or device:
            tarry.set_backend(options.backend, device)
    except BackendError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tarry.config.compile = options.compile or tarry.config.compile
    watch, progress, stack = Watch(), CompileProgress(console), ExitStack()
    register_optimizer_step_post_hook(lambda *_: watch.end_step())
    stack.enter_context(events.subscribe(watch))
    if not options.quiet:
        stack.enter_context(events.subscribe(progress))
    losses = None
    if eager is not None:
        from tarry.cli.compare import Losses

        losses = Losses(options.compare_eager)
        losses.watch()
    watch_reads(torch.Tensor, events.emit, places.of_caller)
    stack.enter_context(replacing(Devices(source)))

    def finish() -> None:
        progress.close()
        if not options.quiet:
            name = tarry.get_backend().name if watch.syncs else ""
            console.print(summary(watch, script.name, source, name, device or "cpu"), soft_wrap=True)
        if eager is not None and losses is not None:
            from tarry.cli.compare import comparison, verdict

            console.print(comparison(eager, losses))
            console.print(f"tarry run: {verdict(eager, losses)}", soft_wrap=True)

    # Nothing is taken back: threads and functions that run at exit go on as they began.
    return run_script(script, lambda: tarry.wait() if watch.syncs else None, finish)
