"""`tarry doctor`: is everything there that tarry needs, and if not, what to do about it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is empty unless there is something to do."""

    subject: str
    state: str  # "ok", "note" (works, but worth knowing), "bad"
    detail: str
    remedy: str = ""


MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}


def doctor() -> int:
    """Print every finding; 1 if one of them is bad."""
    console = Console(soft_wrap=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")  # a path must be copied whole
    findings = list(examine())
    for finding in findings:
        text = escape(finding.detail)
        if finding.remedy:
            text += f"\n[bold]{escape(finding.remedy)}[/]"
        table.add_row(MARKS[finding.state], escape(finding.subject), text)
    console.print(table)
    bad = [finding.subject for finding in findings if finding.state == "bad"]
    console.print(f"wrong: {', '.join(bad)}" if bad else "all is well")
    return 1 if bad else 0


def examine() -> Iterator[Finding]:
    """All checks in order; one that fails does not stop the next, unless nothing can work without it."""
    yield _python()
    torch = _torch()
    yield torch
    if torch.state == "bad":
        return
    native = _native()
    yield from _tools(needed=native.state != "ok")
    yield native
    yield _cuda()
    yield from _guarded("backend", _backend)
    yield from _guarded("x + y", _self_check)


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "bad", str(error), f"{sys.executable} -m pip install torch")
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < (2, 11):
        return Finding("torch", "bad", torch.__version__, "tarry needs torch 2.11 or newer: pip install -U torch")
    return Finding("torch", "ok", torch.__version__)


def _tools(needed: bool) -> Iterator[Finding]:
    """Compiler, ninja and headers: needed only until the native part is built."""
    from tarry.errors import NativeBuildError
    from tarry.native import _toolchain

    checks: dict[str, Callable[[], str]] = {
        "compiler": lambda: _toolchain.find_compiler().version,
        "ninja": _toolchain.find_ninja,
        "Python.h": lambda: str(_toolchain.python_include()),
    }
    for subject, check in checks.items():
        try:
            yield Finding(subject, "ok", check())
        except NativeBuildError as error:
            if needed:
                first, _, remedy = str(error).partition("\n")
                yield Finding(subject, "bad", first, remedy)
            else:
                yield Finding(subject, "note", "not found; the native part is built, so it is not needed now")


def _native() -> Finding:
    from tarry.errors import NativeBuildError
    from tarry.native._build import TARRY, Plan

    try:
        found = Plan(TARRY).find()
    except NativeBuildError as error:
        return Finding("native part", "bad", str(error))
    if found is None:
        return Finding("native part", "note", "not built yet; the first `import tarry` builds it")
    return Finding("native part", "ok", str(found))


def _cuda() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("CUDA", "ok", "no device; tarry works on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("CUDA", "ok", ", ".join(names))


def _guarded(subject: str, check: Callable[[], Finding]) -> Iterator[Finding]:
    """A check that runs tarry itself: whatever it raises is a finding."""
    try:
        yield check()
    except Exception as error:
        first, _, rest = str(error).partition("\n")
        yield Finding(subject, "bad", f"{type(error).__name__}: {first}", rest)


def _backend() -> Finding:
    import tarry
    from tarry.backends import registry

    return Finding("backend", "ok", f"{tarry.get_backend()}; known: {', '.join(registry.names())}")


def _self_check() -> Finding:
    import torch

    import tarry

    x = torch.tensor([1.0, 2.0], device="tarry")
    y = torch.tensor([10.0, 20.0], device="tarry")
    result = (x + y).tolist()
    tarry.mark_step(wait=True)
    if result != [11.0, 22.0]:
        return Finding(
            "x + y", "bad", f"[1, 2] + [10, 20] gave {result} on the device 'tarry'", "this is a fault of the backend"
        )
    return Finding("x + y", "ok", f"[1, 2] + [10, 20] = {result} on the device 'tarry'")
