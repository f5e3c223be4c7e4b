"""Start of the `tarry` command, outside the package so that it can run before the package does.

`import tarry` loads torch (seconds) and builds the native part (a minute, or an error). `tarry --help` must wait for
neither, and `tarry doctor` is there for the day when they fail. So the package is entered into `sys.modules` with its
`__init__` not yet run: `tarry.cli` can be imported, and the first use of a public name of `tarry` runs `__init__`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Deferred(ModuleType):
    """The package `tarry` until a name of it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks for such names; they are no use of the package
            raise AttributeError(name)
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        # From here on a missing name is an ordinary AttributeError.
        self.__class__ = ModuleType  # type: ignore[assignment]
        try:
            self.__spec__.loader.exec_module(self)
        except BaseException:
            self.__class__ = _Deferred
            raise
        return getattr(self, name)


def defer_package() -> None:
    """Enter the package `tarry` into `sys.modules` without running its `__init__`."""
    if "tarry" in sys.modules:
        return
    spec = importlib.util.find_spec("tarry")
    if spec is None:
        raise SystemExit("the package tarry is not installed for this Python: " + sys.executable)
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Deferred
    sys.modules["tarry"] = module


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    defer_package()
    from tarry.cli import main as run

    return run(argv)


if __name__ == "__main__":
    raise SystemExit(main())
