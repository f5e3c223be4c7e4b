"""The kinds of events and their fields, as data: the one place that says what an event means and carries.

docs/events.md shows these tables to users, and a test compares the two. Another test has each kind emitted by a
program, with the program's own line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Field:
    """One thing that events carry."""

    name: str
    default: Any
    """Its value where an event does not say; its type is that of all values."""
    meaning: str


@dataclass(frozen=True)
class Kind:
    """One kind of event. Besides `fields`, all of them have `COMMON`."""

    name: str
    topic: str
    """Under which name TARRY_LOG and the logger show it; "" for those that are only counted."""
    meaning: str
    fields: tuple[str, ...] = ()
    remedy: str = ""
    """What to write instead, where an event has no better advice; "" if there is nothing to change."""


COMMON = ("file", "line", "library", "module", "reason", "seconds", "remedy")
"""What every event has: where, why, how much, and what to do about it."""

FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("file", "", "the user's file: of the innermost frame that is not a library's; \"\" if there is none"),
        Field("line", 0, "its line; 0 if unknown"),
        Field("library", "", "\"file:line\" of the library's frame that the user's line has called, if there is one"),
        Field("module", "", "the torch.nn.Module in which it happened: model.blocks.3.attn"),
        Field("reason", "", "the cause, in words"),
        Field("seconds", 0.0, "what it cost the program, or the background"),
        Field("remedy", "", "what to write instead, in words"),
        Field("operations", 0, "operators of the graph"),
        Field("path", "", 'what computed the step: "reference", "compiled", "native", "replayed" or "direct"'),
        Field("start", 0.0, "time.perf_counter() when its recording began; of a collective: when it did"),
        Field("record_seconds", 0.0, "from the first recorded operator to the cut: the program's own Python"),
        Field("wait_seconds", 0.0, "of `seconds`: until the step before was done; until the other ranks were"),
        Field("execute_seconds", 0.0, "of `seconds`: in the program or the reference path; compiles are in neither"),
        Field("device", 0, "N of tarry:N"),
        Field("key", None, "what identifies the graph, or the stored program"),
        Field("again", False, "whether a graph like it was compiled before"),
        Field("background", False, "whether the program went on meanwhile"),
        Field("backend", "", "the backend's name"),
        Field("lines", None, '("file:line", "file:line"): the first and the last line of the graph; None if unknown'),
        Field("before", 0.0, "median seconds from one such step to the next, before"),
        Field("after", 0.0, "the same, with the program"),
        Field("op", "", "the operator"),
        Field("method", "", 'how the value was read: "item", or "copy" for .cpu(), .tolist(), print'),
        Field("bytes", 0, "how much"),
        Field("ranks", 0, "how many processes take part"),
        Field("direction", "", "of a transfer"),
        Field("stage", "", 'where it failed: "compile", "execute", "set_backend" or "teardown"'),
        Field("error", "", "the error"),
        Field("calls", 0, "pieces of the graph"),
        Field("kinds", 0, "different ones among them, each compiled once"),
        Field("function", "", "the function that was given to tarry.compile"),
    )
}

_READ = "read it every tenth step, keep a running sum on the device, or in tarry.add_step_closure(..., run_async=True)"
_SAME = "keep shapes and numbers alike from step to step: DataLoader(drop_last=True), padding; docs/compiling.md"

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        # ---- steps
        Kind(
            "sync",
            "sync",
            "a step: what was pending was computed; `reason` is what asked for it",
            ("operations", "path", "start", "record_seconds", "wait_seconds", "execute_seconds", "device"),
        ),
        Kind("read", "read", "the program has waited for a value", ("method", "device"), _READ),
        Kind(
            "budget_cut",
            "cut",
            "a step was cut because enough was pending: `reason` is which cap",
            ("operations", "device"),
            "end the step where the loop does, with tarry.mark_step(), or raise the cap that the reason names",
        ),
        Kind("reference", "reference", "a step ran operator by operator: it has no program, or none yet", ("key",)),
        Kind(
            "interpreted",
            "reference",
            "a step ran operator by operator because the backend cannot compile it",
            ("key",),
            "avoid the operator that the reason names, or choose another backend: tarry.set_backend",
        ),
        Kind(
            "fallback",
            "fallback",
            "an operator was not recorded: all that was pending was computed, then it ran by itself",
            ("op",),
            "use a form whose result has a known shape: torch.where or a mask instead of nonzero and boolean indexing",
        ),
        Kind("execute", "", "a program or the reference path has computed a step"),
        Kind("cache_hit", "", "a step found its program"),
        Kind("transfer", "", "data went to a backend that has its own", ("direction", "bytes")),
        Kind(
            "collective",
            "collective",
            "a collective is done: it went on beside other work, and the step has waited for `seconds` of it",
            ("op", "bytes", "ranks", "start", "wait_seconds"),
        ),
        # ---- compiles
        Kind("compiling", "compile", "a compile begins", ("operations", "again", "background", "backend", "lines")),
        Kind(
            "compile",
            "compile",
            "a program was compiled: for the first time, or `again` (topic recompile)",
            ("operations", "again", "background", "backend", "key", "lines"),
        ),
        Kind(
            "slow_compile",
            "slow_compile",
            "a compile took long",
            ("operations", "again", "background", "backend", "lines"),
            "programs stay on disk, so that the next process has them at once (TARRY_STORE, TARRY_CACHE_DIR); "
            "--compile background lets steps go on meanwhile; fewer operators per step compile faster",
        ),
        Kind(
            "takeover",
            "takeover",
            "a program from the background serves the steps of its graph; `seconds` is what compiling took",
            ("operations", "before", "after", "backend", "lines"),
        ),
        Kind("pieces", "compile", "a graph is compiled in pieces", ("calls", "kinds")),
        Kind(
            "torch_compile",
            "compile",
            "a graph that torch.compile has traced on tarry is recorded instead of being given to Inductor",
            ("operations",),
        ),
        Kind("compile_here", "compile", "what the worker process could not compile is compiled here", ("backend",)),
        # ---- programs on disk
        Kind("store_hit", "store", "a program was found on disk", ("key", "bytes")),
        Kind(
            "store_miss",
            "store",
            "no program was found on disk; `reason` says why",
            ("key",),
            "nothing, on a first run; else see the reason: programs are kept apart by torch, tarry and backend",
        ),
        Kind("store_wait", "store", "another process compiles the program, and this one waits for it", ("key",)),
        Kind(
            "store_skip",
            "store",
            "a program was not kept on disk",
            ("key", "backend"),
            "raise tarry.config.max_stored_bytes if it was too large; the next process compiles it again otherwise",
        ),
        Kind(
            "store_evict",
            "store",
            "a program was removed from disk: all of them take more than max_stored_bytes",
            ("key", "bytes"),
            "raise tarry.config.max_stored_bytes",
        ),
        Kind(
            "store_corrupt",
            "store",
            "a damaged program was removed from disk; it is compiled again",
            ("key",),
            "if it comes again, look at the disk, or move the store: TARRY_CACHE_DIR",
        ),
        # ---- tarry.compile
        Kind("replay", "", "a call was replayed", ("function",)),
        Kind(
            "replay_refused",
            "replay",
            "a call cannot be replayed",
            ("function",),
            "see step.explain(), and docs/replay.md for what a compiled function may depend on",
        ),
        Kind(
            "replay_guard_failed",
            "replay",
            "a call was recorded because something is not as it was when its replay was made",
            ("function",),
            "make what changes at every call a tensor argument; see step.explain()",
        ),
        Kind("replay_verified", "", "a recorded call did as its replay would have done", ("function",)),
        Kind(
            "replay_deviation",
            "replay",
            "a recorded call did otherwise than its replay would have done",
            ("function",),
            "make what the function depends on an argument, a tensor or a plain attribute of an object that it names",
        ),
        # ---- failures
        Kind("error", "error", "a step failed: `stage` says where", ("stage", "backend", "error")),
        Kind(
            "backend_fault",
            "fault",
            "a backend failed where the reference path does not: the step has its values all the same",
            ("stage", "backend", "error"),
            "tarry.set_backend('eager') does without the backend; report the fault with TARRY_SAVE_GRAPHS=folder",
        ),
    )
}

TOPICS: tuple[str, ...] = tuple(sorted({kind.topic for kind in KINDS.values() if kind.topic} | {"recompile"}))
"""What TARRY_LOG takes. `recompile` is the compiles that are `again`."""
