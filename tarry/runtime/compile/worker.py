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
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tarry.backends.base import Backend, Computation
from tarry.errors import IRError, Unsupported
from tarry.ir.graph import Graph
from tarry.ir.text import parse
from tarry.runtime import limits
from tarry.runtime.compile.messages import receive, send
from tarry.runtime.dispatch import compiling
from tarry.store import pack, unpack


def answer(request: bytes) -> bytes:
    """Compile one graph. What "cannot" be done here has to be done by the process that asks."""
    header, (text,) = unpack(request)
    try:
        module, _, name = header["class"].partition(":")
        kind = getattr(import_module(module), name)
        backend: Backend = kind.from_recipe(header["recipe"])
        graph = parse(bytes(text).decode())
    except (ImportError, AttributeError, IRError) as error:  # a class of the program itself, a custom operator
        return pack({"outcome": "cannot", "reason": str(error)})
    try:
        with compiling():
            return _compile(backend, graph, header["symbols"])
    except Unsupported as error:
        return pack({"outcome": "unsupported", "reason": error.reason})
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return pack({"outcome": "failed", "reason": reason}, [traceback.format_exc().encode()])


def _compile(backend: Backend, graph: Graph, symbols: list[int] | None) -> bytes:
    made = backend.compile(graph) if symbols is None else backend.compile_symbolic(graph, tuple(symbols))
    if not isinstance(made, Computation) or made.artifact is None:
        return pack({"outcome": "cannot", "reason": f"backend {backend.name!r} gave no artifact"})
    try:
        return pack({"outcome": "done"}, [made.artifact()])
    except Exception as error:
        return pack({"outcome": "cannot", "reason": f"its program cannot be stored: {error}"})


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a compiler that prints must not print into the replies
    _stand_back()
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    send(replies, pack({"outcome": "ready"}))
    while True:
        try:
            request = requests.get(timeout=limits.WORKER_IDLE_SECONDS)
        except queue.Empty:
            return
        send(replies, answer(request))


def _stand_back() -> None:
    """Take a low priority. Where the kernel shares processors between sessions first (autogroups), a process's own
    priority counts within its session only; so that of the session, which is ours alone, is lowered as well."""
    os.nice(limits.WORKER_NICENESS)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(limits.WORKER_NICENESS))


def _listen(requests: queue.SimpleQueue[bytes]) -> None:
    while (request := receive(sys.stdin.buffer)) is not None:
        requests.put(request)
    os.killpg(0, signal.SIGKILL)  # this process and the compilers that it has started


if __name__ == "__main__":
    main()
