"""`python -m benchmarks [NAME] [options]`: one benchmark, or without a name all that docs/performance.md shows."""

from __future__ import annotations

import importlib
import sys

from benchmarks import MODULES

if __name__ == "__main__":
    if sys.argv[1:2] == ["render"]:
        from benchmarks.suite import render

        raise SystemExit(render(sys.argv[2:]))
    name, *arguments = sys.argv[1:] if sys.argv[1:2] and sys.argv[1] in MODULES else ["all", *sys.argv[1:]]
    raise SystemExit(importlib.import_module(MODULES[name]).main(arguments))
