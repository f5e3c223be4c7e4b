"""The process that compiles for another one, started by `process.py` as `python -m tarry.runtime.compile.worker`.

It takes graphs as text and gives back programs as bytes (`Computation.artifact`), at a low priority. It ends
when it has had nothing to do for a while, and at once when the process is gone that started it.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tarry.backends.base import Backend, Computation, Run
from tarry.errors import IRError, Unsupported
from tarry.ir.sizes import Symbols
from tarry.ir.text import parse
from tarry.runtime import limits
from tarry.runtime.dispatch import compiling


def answer(module: str, name: str, recipe: Any, texts: Sequence[str], symbols: Symbols | None) -> tuple[str, Any, str]:
    """Compile graphs: the outcome, the programs or a reason, and a traceback. What "cannot" be done here has to be
    done by the process that asks."""
    try:
        backend: Backend = getattr(import_module(module), name).from_recipe(recipe)
        graphs = [parse(text) for text in texts]
    except (ImportError, AttributeError, IRError) as error:  # a class of the program itself, a custom operator
        return "cannot", str(error), ""
    try:
        with compiling():
            made: Sequence[Computation | Run]
            if symbols is None:
                made = backend.compile_all(graphs)
            else:
                made = [backend.compile_symbolic(graph, symbols) for graph in graphs]
            artifacts = [each.artifact for each in made if isinstance(each, Computation) and each.artifact is not None]
            if len(artifacts) < len(graphs):
                return "cannot", f"backend {backend.name!r} gave no artifact", ""
            try:
                return "done", [artifact() for artifact in artifacts], ""
            except Exception as error:
                return "cannot", f"its program cannot be stored: {error}", ""
    except Unsupported as error:
        return "unsupported", error.reason, ""
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}", traceback.format_exc()


def main() -> None:
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    _stand_back()
    requests: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, requests), daemon=True).start()
    pipe.send(("ready", None, ""))
    while True:
        try:
            request = requests.get(timeout=limits.WORKER_IDLE_SECONDS)
        except queue.Empty:
            return
        pipe.send(answer(*request))


def _stand_back() -> None:
    """Take a low priority. Where the kernel shares processors between sessions first (autogroups), a process's own
    priority counts within its session only; so lower that of the session, which is this process's alone, as well."""
    os.nice(limits.WORKER_NICENESS)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(limits.WORKER_NICENESS))


def _listen(pipe: Connection[Any, Any], requests: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    with suppress(EOFError, OSError):
        while True:
            requests.put(pipe.recv())
    os.killpg(0, signal.SIGKILL)  # this process and the compilers that it has started


if __name__ == "__main__":
    main()
