"""The compiled recorder, as a Python module: `from tarry.native import C`.

`_C.pyi` declares what is in it. The first use in a new environment compiles `tarry/csrc` (about a minute); later ones
load the result from the cache. Nothing is built by importing this package: only by asking for `C`, so that tools which
explain a failed build (`tarry doctor`, `python -m tarry.native`) can be imported where the build fails.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tarry.native import _C as C  # noqa: F401 - at run time set on first use, by __getattr__ below


def __getattr__(name: str) -> Any:
    if name != "C":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _is_the_command():
        from tarry.native.__main__ import main

        raise SystemExit(main())
    from tarry.native._build import TARRY
    from tarry.native._load import load

    module = load(TARRY)
    globals()["C"] = module
    return module


def _is_the_command() -> bool:
    """Whether Python is on its way to run `python -m tarry.native`.

    Python imports the package `tarry` before it runs that module, and `import tarry` asks for `C`: without this
    look ahead, `--help` would first build for a minute and `--force` would build twice. While `-m` looks for its
    module, `sys.argv[0]` is documented to be "-m".
    """
    return bool(sys.argv) and sys.argv[0] == "-m" and __name__ in sys.orig_argv
