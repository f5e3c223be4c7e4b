"""`tarry run`: an unmodified script on tarry, with a summary of what happened at its end."""

from __future__ import annotations

import argparse
import atexit
import os
import re
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.console import Console

from tarry.cli.script import Script
from tarry.cli.script import run as run_script

if TYPE_CHECKING:
    from tarry.cli.compare import Losses
    from tarry.cli.watch import Watch
    from tarry.lazy.devices import Source


# A script with one of these words runs on CUDA where it can: it names CUDA, or a framework that prefers CUDA.
_ACCELERATED = re.compile(r"\b(cuda|torch\.accelerator|Trainer|Accelerator|lightning|pytorch_lightning)\b")


def run(options: argparse.Namespace) -> int:
    """Run a script on tarry; the exit status is the script's own."""
    script = _script(options)
    source = _source(options, script)
    device = options.device or _default_device(source)
    console = Console(stderr=True, highlight=False, quiet=options.quiet)
    eager = losses = None
    if options.compare_eager:
        from tarry.cli.compare import Losses, run_eagerly

        eager = run_eagerly(script, source, device or "cpu", options.compare_eager, console)
        losses = Losses(options.compare_eager)
    import tarry
    from tarry.cli.progress import CompileProgress
    from tarry.cli.watch import Watch
    from tarry.errors import BackendError

    # The first use of a name loads the package (tarry_command.py). Until then `tarry.config` is a module of that name.
    assert callable(tarry.set_backend)
    try:
        if options.backend or device:
            tarry.set_backend(options.backend, device)
    except BackendError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tarry.config.compile = options.compile or tarry.config.compile
    from tarry._api import event_log  # after a first use of the package, which the command loads late

    event_log.quiet = True  # progress and summary say it
    watch, progress = Watch(), CompileProgress(console)
    try:
        report = tarry.report(options.report) if options.report else None
    except (OSError, ValueError) as error:
        print(f"error: --report: {error}", file=sys.stderr)
        return 2
    _begin(source, watch, None if options.quiet else progress, losses)

    def finish() -> None:
        progress.close()
        _say(console, watch, script.name, source, device or "cpu")
        if report is not None:
            report.close()
            console.print(f"tarry run: report: {report.path}, events: {report.events_path}", soft_wrap=True)
        if eager is not None and losses is not None:
            from tarry.cli.compare import comparison, verdict

            console.print(comparison(eager, losses))
            console.print(f"tarry run: {verdict(eager, losses)}", soft_wrap=True)

    return run_script(script, lambda: tarry.wait() if watch.syncs else None, finish)


def _script(options: argparse.Namespace) -> Script:
    if options.module is not None:
        return Script(options.module[0], True, tuple(options.module[1:]))
    return Script(options.script, False, tuple(options.arguments))


def _source(options: argparse.Namespace, script: Script) -> Source:
    """The device that the script was written for."""
    if options.source != "auto":
        return "cuda" if options.source == "cuda" else "cpu"
    return "cuda" if _ACCELERATED.search(script.text()) else "cpu"


def _default_device(source: str) -> str | None:
    """The real device that is meant if none is named; None: the backend's own."""
    import torch

    return os.environ.get("TARRY_DEVICE") or ("cuda" if source == "cuda" and torch.cuda.is_available() else None)


def _begin(source: Source, watch: Watch, progress: object, losses: Losses | None) -> None:
    """Watch what happens, and put lazy mode into force, until after the functions that the script has run at exit."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from tarry import events
    from tarry.integrations import take_over
    from tarry.lazy.devices import Devices
    from tarry.lazy.mode import replacing

    take_over()
    stack = ExitStack()
    for subscriber in (watch, progress):
        if callable(subscriber):
            stack.enter_context(events.subscribe(subscriber, live=False))
    register_optimizer_step_post_hook(lambda *_: watch.end_step())
    if losses is not None:
        losses.watch()
    stack.enter_context(replacing(Devices(source)))
    atexit.register(stack.close)


def _say(console: Console, watch: Watch, name: str, source: str, device: str) -> None:
    import tarry
    from tarry.cli.summary import summary

    tarry.events.flush()
    watch.finish()
    backend = tarry.get_backend().name if watch.syncs else ""
    console.print(summary(watch, name, source, backend, device), soft_wrap=True)
