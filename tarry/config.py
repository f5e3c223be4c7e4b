"""Settings, each with its environment variable. `tarry.config` is the one instance; `print(tarry.config)` shows it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar, overload

Fallback = Literal["allow", "error"]
Compile = Literal["wait", "background", "never"]
COMPILE_POLICIES = ("wait", "background", "never")
T = TypeVar("T")


class Setting(Generic[T]):
    """One setting: a property of `Config` that is read from the environment once, and checked when it is set."""

    def __init__(
        self, variable: str, default: str, check: Callable[[Any], T], read: Callable[[str], Any], doc: str, notify: bool
    ) -> None:
        """`default` is written as in the environment; `read` makes a value of it. `notify`: changes reach listeners."""
        self.variable, self.default, self.check, self.read, self.notify = variable, default, check, read, notify
        self.__doc__ = f"{doc} {variable}."

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def initial(self) -> T:
        """The value from the environment, or the default."""
        return self.checked(self.read(os.environ.get(self.variable) or self.default))

    def checked(self, value: Any) -> T:
        """The value as it is kept; raises if it cannot be."""
        try:
            return self.check(value)
        except (ValueError, TypeError) as error:
            raise type(error)(f"tarry.config.{self.name} {error}") from None

    @overload
    def __get__(self, instance: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, instance: Config, owner: type) -> T: ...
    def __get__(self, instance: Config | None, owner: type) -> Setting[T] | T:
        return self if instance is None else instance._values[self.name]

    def __set__(self, instance: Config, value: Any) -> None:
        instance._set(self, self.checked(value), "set in code")


def _whole(variable: str, default: int, least: int, doc: str, *, notify: bool = False) -> Setting[int]:
    def check(value: Any) -> int:
        if not isinstance(value, int) or value < least:
            raise ValueError(f"is {'a positive int' if least else 'a number of bytes'}, not {value!r}")
        return value

    return Setting(variable, str(default), check, int, doc, notify)


def _flag(variable: str, default: bool, doc: str, *, notify: bool = False) -> Setting[bool]:
    return Setting(variable, str(int(default)), bool, lambda text: text != "0", doc, notify)


def _fallback(value: Any) -> Fallback:
    if value not in ("allow", "error"):
        raise ValueError(f'is "allow" or "error", not {value!r}')
    return value


def _policy(value: Any) -> Compile | None:
    if value is not None and value not in COMPILE_POLICIES:
        raise ValueError(f'is None, "wait", "background" or "never", not {value!r}')
    return value


def _operators(names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError('takes a set of names, such as {"aten::add.Tensor"}')
    chosen = frozenset(names)
    for name in chosen:
        if "::" not in name:
            raise ValueError(f'has {name!r}, which lacks a namespace; write "aten::{name}"')
    return chosen


def _names(names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError('takes a set of names, such as {"recompile"}')
    return frozenset(names)


def _folder(value: Any) -> Path | None:
    return None if value is None else Path(value).expanduser()


class Config:
    """What a user may set. A change takes effect at once; the recorder and other subscribers are notified."""

    fallback = Setting(
        "TARRY_FALLBACK",
        "allow",
        _fallback,
        str,
        """What happens when an operator has to run eagerly: "allow" (it is counted) or "error".""",
        True,
    )
    force_fallback = Setting(
        "TARRY_FORCE_FALLBACK",
        "",
        _operators,
        lambda text: [name for name in text.split(",") if name],
        """Operators that always run eagerly, to find a faulty one: "aten::add.Tensor", or "aten::add" for all overloads
        of it. A name that fits no operator is refused.""",
        True,
    )
    max_pending_nodes = _whole(
        "TARRY_MAX_PENDING_NODES",
        100_000,
        1,
        "A step is cut when this many nodes are recorded, which bounds memory.",
        notify=True,
    )
    max_pending_bytes = _whole(
        "TARRY_MAX_PENDING_BYTES",
        64 << 20,
        0,
        """A step is cut when recorded work holds this much more than eager would have held at its worst since the last
        cut: batches that were uploaded and let go, above all. Half of that worst is allowed in any case, so that a
        large model's step stays whole.""",
        notify=True,
    )
    max_cached_programs = _whole(
        "TARRY_MAX_CACHED_PROGRAMS", 1024, 1, "Compiled programs kept in memory; the least recently used goes first."
    )
    symbolic_sizes = _flag(
        "TARRY_SYMBOLIC_SIZES",
        True,
        """Whether a step that comes again with other sizes is compiled once for all of them, where the backend can;
        otherwise every size is compiled by itself.""",
    )
    compile_pieces = _flag(
        "TARRY_COMPILE_PIECES",
        True,
        """Whether a graph whose parts repeat, such as the layers of a network, has each kind of part compiled once;
        otherwise every graph is compiled as a whole. Programs that are there stay.""",
    )
    compile = Setting(
        "TARRY_COMPILE",
        "",
        _policy,
        lambda text: text or None,
        """What a step does whose graph has no program yet: "wait" for the compiler; run on the reference path while a
        graph that comes again is compiled in the "background"; "never" compile. None: what the backend prefers.""",
        True,
    )
    store = _flag("TARRY_STORE", True, "Whether compiled programs are kept on disk for other processes (`cache_dir`).")
    max_stored_bytes = _whole(
        "TARRY_STORE_BYTES", 1 << 30, 0, "What the programs on disk may take; the least recently used goes first."
    )
    cut_after_optimizer = _flag("TARRY_CUT_AFTER_OPTIMIZER", True, "Whether the end of optimizer.step() ends the step.")
    direct_calls = _flag(
        "TARRY_DIRECT_CALLS",
        True,
        """Whether operators run at once, as in eager PyTorch, while no program computes the steps that they are
        recorded for: it is still being made, or the steps are too small for one. On a CPU only.""",
        notify=True,
    )
    run_ahead = _flag(
        "TARRY_RUN_AHEAD",
        True,
        """Whether a second thread computes what no thread waits for: on a CPU, a step while the next is recorded; and
        a part of a step that comes again while it is still being recorded itself. Programs that are compiled while it
        is off never do the latter. On a CPU it is used only where PyTorch's own threads leave a core free, or with one
        thread.""",
        notify=True,
    )
    log = Setting(
        "TARRY_LOG",
        "",
        _names,
        lambda text: [name.strip() for name in text.split(",") if name.strip()],
        """Which events are lines of the logger `tarry`, by topic: "recompile", "fallback", "read", "sync", ...
        (docs/events.md), or "all". Without any, only what costs much is logged.""",
        True,
    )
    save_graphs = Setting(
        "TARRY_SAVE_GRAPHS",
        "",
        _folder,
        lambda text: text or None,
        """A folder to write the graph of each step to, as text: each graph once, and a line for each step.""",
        True,
    )
    portable_checkpoints = _flag(
        "TARRY_PORTABLE_CHECKPOINTS",
        False,
        """Whether torch.save writes tensors of the device as if they were on the CPU: the file loads where tarry is not
        installed, and without map_location its tensors are on the CPU.""",
    )
    full_tracebacks = _flag(
        "TARRY_FULL_TRACEBACKS", False, "Whether errors show the frames of tarry that they came through.", notify=True
    )

    def __init__(self) -> None:
        self._listeners: list[Callable[[str, Any], None]] = []
        self._values: dict[str, Any] = {name: setting.initial() for name, setting in _settings()}
        self._origins = {
            name: f"{s.variable} in the environment" if os.environ.get(s.variable) else "default"
            for name, s in _settings()
        }

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

    def origin(self, name: str) -> str:
        """Where a value came from: "default", the variable of the environment, or "set in code"."""
        if name in ("kept_memory", "cache_dir"):
            variable = f"TARRY_{name.upper()}"
            return f"{variable} in the environment" if os.environ.get(variable) else "default"
        return self._origins[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            self.__getattr__(name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> NoReturn:
        close = difflib.get_close_matches(name, [known for known, _ in _settings()], 1)
        hint = f"; do you mean {close[0]!r}?" if close else "; print(tarry.config) shows all"
        raise AttributeError(f"tarry.config has no setting {name!r}{hint}")

    def __repr__(self) -> str:
        names = [*(name for name, _ in _settings()), "kept_memory", "cache_dir"]
        rows = [(name, repr(_shown(getattr(self, name))), self.origin(name)) for name in sorted(names)]
        widths = [max(len(row[k]) for row in rows) for k in range(2)]
        return "tarry.config\n" + "\n".join(f"  {n:<{widths[0]}}  {v:<{widths[1]}}  {o}" for n, v, o in rows)

    @contextmanager
    def override(self, **settings: Any) -> Iterator[None]:
        """`with tarry.config.override(fallback="error"):` sets for the block only."""
        before = {name: (getattr(self, name), self._origins.get(name, "")) for name in settings}
        try:
            for name, value in settings.items():
                setattr(self, name, value)
            yield
        finally:
            for name, (value, origin) in before.items():
                setattr(self, name, value)
                self._origins[name] = origin

    def subscribe(self, listener: Callable[[str, Any], None]) -> None:
        """Have `listener(name, value)` called after each change that the recorder must know of, and once now. One that
        raises refuses the change."""
        self._listeners.append(listener)
        for name, setting in _settings():
            if setting.notify:
                listener(name, self._values[name])

    def reread(self) -> None:
        """Read the environment again, but for what was set in code."""
        for name, setting in _settings():
            if self._origins[name] != "set in code" and (value := setting.initial()) != self._values[name]:
                self._set(setting, value, f"{setting.variable} in the environment")

    def _set(self, setting: Setting[Any], value: Any, origin: str) -> None:
        before = self._values[setting.name]
        self._values[setting.name] = value
        try:
            for listener in self._listeners if setting.notify else ():
                listener(setting.name, value)
        except BaseException:
            self._values[setting.name] = before
            raise
        self._origins[setting.name] = origin


def _settings() -> Iterator[tuple[str, Setting[Any]]]:
    return ((name, value) for name, value in vars(Config).items() if isinstance(value, Setting))


def _shown(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value) if isinstance(value, Path) else value


config = Config()
