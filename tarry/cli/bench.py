"""`tarry bench`: runs a benchmark of the checkout."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def bench(name: str, arguments: list[str]) -> int:
    """Run one benchmark with its own arguments. Benchmarks are not installed: they belong to the checkout."""
    checkout = Path(__file__).resolve().parent.parent.parent
    if not (checkout / "benchmarks" / "__init__.py").is_file():
        print(
            "error: benchmarks/ is part of tarry's sources and not of the installed package; "
            "run this from a checkout installed with: pip install -e .",
            file=sys.stderr,
        )
        return 1
    sys.path.insert(0, str(checkout))
    modules: dict[str, str] = importlib.import_module("benchmarks").MODULES
    module = importlib.import_module(modules[name])
    return int(module.main([argument for argument in arguments if argument != "--"]))
