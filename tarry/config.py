"""Settings, each with its environment variable. `tarry.config` is the one instance."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Fallback = Literal["allow", "error"]
Compile = Literal["wait", "background", "never"]
COMPILE_POLICIES = ("wait", "background", "never")


class Config:
    """What a user may set. A change takes effect at once; the recorder and other subscribers are notified."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[str, Any], None]] = []
        self._fallback: Fallback = "allow"
        self._force_fallback: frozenset[str] = frozenset()
        self._max_pending_nodes = int(os.environ.get("TARRY_MAX_PENDING_NODES", "100000"))
        self._max_pending_bytes = int(os.environ.get("TARRY_MAX_PENDING_BYTES", str(64 << 20)))
        self._max_cached_programs = int(os.environ.get("TARRY_MAX_CACHED_PROGRAMS", "1024"))
        self._run_ahead = os.environ.get("TARRY_RUN_AHEAD", "1") != "0"
        self.symbolic_sizes = os.environ.get("TARRY_SYMBOLIC_SIZES", "1") != "0"
        """Whether a step that comes again with other sizes is compiled once for all of them, where the backend can.
        TARRY_SYMBOLIC_SIZES=0 turns it off: every size is compiled by itself."""
        self.compile_pieces = os.environ.get("TARRY_COMPILE_PIECES", "1") != "0"
        """Whether a graph whose parts repeat, such as the layers of a network, has each kind of part compiled once.
        TARRY_COMPILE_PIECES=0 turns it off: every graph is compiled as a whole. Programs that are there stay."""
        self._cut_after_optimizer = os.environ.get("TARRY_CUT_AFTER_OPTIMIZER", "1") != "0"
        self._store = os.environ.get("TARRY_STORE", "1") != "0"
        self._max_stored_bytes = int(os.environ.get("TARRY_STORE_BYTES", str(1 << 30)))
        self.compile = os.environ.get("TARRY_COMPILE") or None  # type: ignore[assignment]
        self.fallback = os.environ.get("TARRY_FALLBACK", "allow")  # type: ignore[assignment]
        self.force_fallback = filter(None, os.environ.get("TARRY_FORCE_FALLBACK", "").split(","))

    @property
    def fallback(self) -> Fallback:
        """What happens when an operator has to run eagerly: "allow" (it is counted) or "error". TARRY_FALLBACK."""
        return self._fallback

    @fallback.setter
    def fallback(self, value: Fallback) -> None:
        if value not in ("allow", "error"):
            raise ValueError(f'tarry.config.fallback is "allow" or "error", not {value!r}')
        self._fallback = value

    @property
    def force_fallback(self) -> frozenset[str]:
        """Operators ("aten::add.Tensor") that always run eagerly, to find a faulty one. TARRY_FORCE_FALLBACK."""
        return self._force_fallback

    @force_fallback.setter
    def force_fallback(self, names: Iterable[str]) -> None:
        if isinstance(names, str):
            raise TypeError('tarry.config.force_fallback takes a set of names, such as {"aten::add.Tensor"}')
        chosen = frozenset(names)
        for name in chosen:
            if "::" not in name:
                raise ValueError(f'tarry.config.force_fallback: {name!r} lacks a namespace; write "aten::{name}"')
        self._force_fallback = chosen
        self._tell("force_fallback", chosen)

    @property
    def max_pending_nodes(self) -> int:
        """A step is cut when this many nodes are recorded, which bounds memory. TARRY_MAX_PENDING_NODES."""
        return self._max_pending_nodes

    @max_pending_nodes.setter
    def max_pending_nodes(self, value: int) -> None:
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"tarry.config.max_pending_nodes is a positive int, not {value!r}")
        self._max_pending_nodes = value
        self._tell("max_pending_nodes", value)

    @property
    def max_pending_bytes(self) -> int:
        """A step is cut when recorded work holds this much more than eager would have held at its worst since the last
        cut: batches that were uploaded and let go, above all. Half of that worst is allowed in any case, so that a
        large model's step stays whole. TARRY_MAX_PENDING_BYTES."""
        return self._max_pending_bytes

    @max_pending_bytes.setter
    def max_pending_bytes(self, value: int) -> None:
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"tarry.config.max_pending_bytes is a number of bytes, not {value!r}")
        self._max_pending_bytes = value
        self._tell("max_pending_bytes", value)

    @property
    def max_cached_programs(self) -> int:
        """Compiled programs kept in memory; the least recently used goes first. TARRY_MAX_CACHED_PROGRAMS."""
        return self._max_cached_programs

    @max_cached_programs.setter
    def max_cached_programs(self, value: int) -> None:
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"tarry.config.max_cached_programs is a positive int, not {value!r}")
        self._max_cached_programs = value

    @property
    def compile(self) -> Compile | None:
        """What a step does whose graph has no program yet: "wait" for the compiler; run on the reference path while a
        graph that comes again is compiled in the "background"; "never" compile. None: what the backend prefers.
        TARRY_COMPILE."""
        return self._compile

    @compile.setter  # noqa: A003 - the property above
    def compile(self, value: Compile | None) -> None:
        if value is not None and value not in COMPILE_POLICIES:
            raise ValueError(f'tarry.config.compile is None, "wait", "background" or "never", not {value!r}')
        self._compile = value

    @property
    def store(self) -> bool:
        """Whether compiled programs are kept on disk for other processes, under `cache_dir`. TARRY_STORE=0: not."""
        return self._store

    @store.setter
    def store(self, value: bool) -> None:
        self._store = bool(value)

    @property
    def max_stored_bytes(self) -> int:
        """What the programs on disk may take; the least recently used goes first. TARRY_STORE_BYTES."""
        return self._max_stored_bytes

    @max_stored_bytes.setter
    def max_stored_bytes(self, value: int) -> None:
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"tarry.config.max_stored_bytes is a number of bytes, not {value!r}")
        self._max_stored_bytes = value

    @property
    def cut_after_optimizer(self) -> bool:
        """Whether the end of optimizer.step() ends the step. TARRY_CUT_AFTER_OPTIMIZER=0 turns it off."""
        return self._cut_after_optimizer

    @cut_after_optimizer.setter
    def cut_after_optimizer(self, value: bool) -> None:
        self._cut_after_optimizer = bool(value)

    @property
    def run_ahead(self) -> bool:
        """Whether a second thread computes what no thread waits for: on a CPU, a step while the next is recorded; and
        a part of a step that comes again while it is still being recorded itself. Programs that are compiled while it
        is off never do the latter. On a CPU it is used only where PyTorch's own threads leave a core free, or with one
        thread. TARRY_RUN_AHEAD=0 turns it off."""
        return self._run_ahead

    @run_ahead.setter
    def run_ahead(self, value: bool) -> None:
        self._run_ahead = bool(value)
        self._tell("run_ahead", self._run_ahead)

    @property
    def kept_memory(self) -> int:
        """Bytes of freed host memory that the process keeps for the next step instead of giving them back to the
        system; 0 leaves the C library's settings alone. Read when a backend on the CPU is chosen. TARRY_KEPT_MEMORY."""
        return int(os.environ.get("TARRY_KEPT_MEMORY", str(1 << 30)))

    @property
    def cache_dir(self) -> Path:
        """Where builds, tables and compiled programs are kept. TARRY_CACHE_DIR."""
        chosen = os.environ.get("TARRY_CACHE_DIR")
        return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "tarry"

    @contextmanager
    def override(self, **settings: Any) -> Iterator[None]:
        """`with tarry.config.override(fallback="error"):` sets for the block only."""
        before = {name: getattr(self, name) for name in settings}
        try:
            for name, value in settings.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def subscribe(self, listener: Callable[[str, Any], None]) -> None:
        """Have `listener(name, value)` called after each change that the recorder must know of."""
        self._listeners.append(listener)
        listener("force_fallback", self._force_fallback)
        listener("max_pending_nodes", self._max_pending_nodes)
        listener("max_pending_bytes", self._max_pending_bytes)
        listener("run_ahead", self._run_ahead)

    def _tell(self, name: str, value: Any) -> None:
        for listener in self._listeners:
            listener(name, value)


config = Config()
