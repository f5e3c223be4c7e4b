"""tarry: a lazy-tensor runtime for PyTorch.

Move a program to `device="tarry"`; it is recorded, compiled and run a step at a time.

`import tarry` registers the device. The names below are the public interface; everything else may change.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING


def _is_codegen() -> bool:
    """Whether this import is the first step of `python -m tarry.codegen`, which needs neither torch nor the device.

    Python runs a package's `__init__` before a module in it. Until it has found that module, `sys.argv[0]` is "-m", and
    the module's name stands in `sys.orig_argv` before the arguments that both have.
    """
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "tarry.codegen"


if TYPE_CHECKING or not _is_codegen():
    from tarry import events, metrics
    from tarry._api import (
        add_step_closure,
        compile,  # noqa: A004 - as torch.compile
        explain,
        get_backend,
        graph,
        mark_step,
        no_recompile,
        register_backend,
        report,
        set_backend,
        sync,
        wait,
        wait_for_compiles,
    )
    from tarry.backends.base import Backend, Capabilities, Computation
    from tarry.backends.lowering import LoweringContext
    from tarry.config import config
    from tarry.custom_ops import foreign
    from tarry.custom_ops.declare import custom_op, lower
    from tarry.errors import RecompileError, ReplayError, Unsupported
    from tarry.lazy.mode import lazy_mode
    from tarry.notebook import load as load_ipython_extension
    from tarry.notebook import unload as unload_ipython_extension

    foreign.install()

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "Capabilities",
    "Computation",
    "LoweringContext",
    "RecompileError",
    "ReplayError",
    "Unsupported",
    "add_step_closure",
    "compile",
    "config",
    "custom_op",
    "events",
    "explain",
    "get_backend",
    "graph",
    "lazy_mode",
    "load_ipython_extension",
    "lower",
    "mark_step",
    "metrics",
    "no_recompile",
    "register_backend",
    "report",
    "set_backend",
    "sync",
    "unload_ipython_extension",
    "wait",
    "wait_for_compiles",
]
