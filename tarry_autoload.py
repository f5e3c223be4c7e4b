"""`import torch` loads tarry, so that a script can write `device="tarry"` and no more.

PyTorch calls `autoload` at the end of its own import (entry point `torch.backends`), in every process of an environment
that has tarry installed. So it must never fail, build nothing, and leave alone a process that would be worse off with
tarry: see `reason_not_to`. `TORCH_DEVICE_BACKEND_AUTOLOAD=0`, PyTorch's own variable, switches it off;
`TARRY_AUTOLOAD=1` loads tarry also where another accelerator is.

Outside of the package: importing a part of that runs its `__init__`, which builds the native part if it is missing.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.metadata import entry_points

is_loaded = False
"""Whether this module has imported tarry, and not the program."""


def autoload() -> None:
    """Called by PyTorch. Whatever goes wrong is a warning."""
    global is_loaded
    try:
        if reason_not_to() is None:
            is_loaded = True
            import tarry  # noqa: F401
    except Exception as error:
        is_loaded = False
        warnings.warn(
            f"tarry could not be loaded with torch: {error}. `import tarry` shows more; "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches this off",
            stacklevel=2,
        )


def reason_not_to() -> str | None:
    """Why tarry is not loaded with torch in this process; None if it is."""
    import torch

    if "tarry" in sys.modules:
        return "it is imported already"
    if torch._C._get_privateuse1_backend_name() != "privateuseone":
        return "another extension has registered a device, and PyTorch has room for one"
    if "compile_worker" in "".join(sys.argv[:1]):
        return "this process compiles for torch.compile, and needs no device"
    if os.environ.get("TARRY_AUTOLOAD") != "1":
        others = [point.name for point in entry_points(group="torch.backends") if point.name != "tarry"]
        if others:
            return f"another extension may want to register a device: {', '.join(others)}"
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and torch.get_device_module(accelerator).device_count() > 0:
            return f"eager training on {accelerator.type} fails beside a registered device (PyTorch issue 161129)"
    return None if _is_built() else "its native part is not built: `import tarry` builds it"


def _is_built() -> bool:
    """Whether `import tarry` has nothing to build."""
    from tarry_command import defer_package

    defer_package()
    try:
        from tarry.native._build import TARRY, Plan

        return Plan(TARRY).find() is not None
    finally:
        # The package must run its `__init__` when it is imported next.
        for name in [name for name in sys.modules if name.partition(".")[0] == "tarry"]:
            del sys.modules[name]
