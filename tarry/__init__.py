"""tarry: a lazy-tensor runtime for PyTorch.

Move a program to `device="tarry"`; it is recorded, compiled and run a step at a time.

`import tarry` registers the device. The names below are the public interface; everything else may change.
"""

from __future__ import annotations

from tarry import events, metrics
from tarry._api import (
    add_step_closure,
    explain,
    get_backend,
    graph,
    mark_step,
    register_backend,
    set_backend,
    sync,
    wait,
)
from tarry.backends.base import Backend, Capabilities, Computation
from tarry.backends.lowering import LoweringContext
from tarry.config import config
from tarry.custom_ops.declare import custom_op
from tarry.errors import Unsupported

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "Capabilities",
    "Computation",
    "LoweringContext",
    "Unsupported",
    "add_step_closure",
    "config",
    "custom_op",
    "events",
    "explain",
    "get_backend",
    "graph",
    "mark_step",
    "metrics",
    "register_backend",
    "set_backend",
    "sync",
    "wait",
]
