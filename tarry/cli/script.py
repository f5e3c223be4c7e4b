"""Running a script or a module as `python script.py` or `python -m module` would."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

from tarry.places import is_ours
from tarry.tracebacks import without_ours


class NoScriptError(Exception):
    """There is no such script or module."""


@dataclass(frozen=True)
class Script:
    """A program that is not loaded yet."""

    name: str
    is_module: bool
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The arguments of `python` that run it."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]

    def text(self) -> str:
        """Its source, as far as it can be found without importing anything."""
        names = [self.name]
        if self.is_module:
            stems = [os.path.join(base, *self.name.split(".")) for base in (os.getcwd(), *sys.path)]
            names = [name for stem in stems for name in (f"{stem}.py", os.path.join(stem, "__main__.py"))]
        found = next((Path(name) for name in names if os.path.isfile(name)), None)
        return "" if found is None else found.read_text(errors="replace")

    def load(self) -> tuple[CodeType, ModuleType]:
        """Its code and the module `__main__` for it; `sys.argv` and `sys.path` are the program's from here on."""
        main = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        if not sys.flags.safe_path:  # python -P puts nothing there
            sys.path[0] = os.getcwd() if self.is_module else str(Path(self.name).resolve().parent)
        if self.is_module:
            sys.argv = ["-m", *self.arguments]  # as Python has it while it looks for the module
            spec = _spec(self.name)
            main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
            path = spec.origin or ""
            code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        else:
            path = self.name
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
            main.__package__ = None
            try:
                with io.open_code(os.path.abspath(path)) as file:
                    source = file.read()
            except OSError as error:
                why = f"[Errno {error.errno}] {error.strerror}"
                raise NoScriptError(f"can't open file {os.path.abspath(path)!r}: {why}") from None
            sys.argv = [path, *self.arguments]
            code = compile(source, os.path.abspath(path), "exec", dont_inherit=True)
        sys.argv = [path, *self.arguments]
        main.__file__ = os.path.abspath(path)
        sys.modules["__main__"] = main
        return code, main


def _spec(name: str) -> importlib.machinery.ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise NoScriptError(f"No module named {error.name}") from None
    if spec is None or spec.loader is None:
        raise NoScriptError(f"No module named {name}")
    return spec


def run(script: Script, settle: Callable[[], None], finish: Callable[[], None]) -> int:
    """Run a script to its end; the exit status, or SystemExit. `settle()` is the last thing that may fail in its name;
    `finish()` is called then, whatever the end was."""
    hook, thread_hook = sys.excepthook, threading.excepthook
    sys.excepthook = lambda kind, error, _: hook(kind, shown := _trimmed(error), shown.__traceback__)
    threading.excepthook = lambda args: thread_hook(_trimmed_arguments(args))
    try:
        code, main = script.load()
    except NoScriptError as error:
        print(f"{sys.executable}: {error}", file=sys.stderr)
        return 1 if script.is_module else 2
    except SyntaxError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    try:
        exec(code, main.__dict__)
        _join_threads()
        settle()
    except SystemExit:
        _join_threads()
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        _join_threads()
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        finish()
    return 0


def _join_threads() -> None:
    """Python ends when all threads have that are not daemons."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _is_hidden(file: str) -> bool:
    return is_ours(file) or file.startswith("<frozen") or file.endswith("tarry_command.py")


def _trimmed(error: BaseException) -> BaseException:
    return without_ours(error, _is_hidden)


def _trimmed_arguments(args: threading.ExceptHookArgs) -> threading.ExceptHookArgs:
    error = args.exc_value
    if error is None:
        return args
    fields: Sequence[object] = (args.exc_type, _trimmed(error), error.__traceback__, args.thread)
    return threading.ExceptHookArgs(fields)
