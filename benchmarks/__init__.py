"""Timings, as ratios against a peer in the same run. Not tests: nothing here passes or fails.

Nothing here imports tarry but the peers that run on it, when they start: eager PyTorch is measured in a process that
has never heard of it.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # nor does `import torch` (tarry_autoload.py)

MODULES = {
    "all": "benchmarks.suite",
    "record": "benchmarks.record_cost",
    "training": "benchmarks.training_step",
    "first-step": "benchmarks.first_step",
    "cold-start": "benchmarks.cold_start",
    "compile-time": "benchmarks.compile_time",
    "generation": "benchmarks.generation",
    "memory": "benchmarks.memory",
    "custom-ops": "benchmarks.custom_ops",
    "reads": "benchmarks.reads",
    "turns": "benchmarks.turns",
    "distributed-scale": "benchmarks.distributed_scale",
}
"""The benchmarks by their names on the command line; each module has a `main(arguments)`."""
