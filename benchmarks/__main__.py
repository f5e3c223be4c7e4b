"""`python -m benchmarks [record|training|custom-ops|generation] [options]`."""

from __future__ import annotations

import sys

from benchmarks import custom_ops, generation, record_cost, training_step

MAINS = {
    "record": record_cost.main,
    "training": training_step.main,
    "custom-ops": custom_ops.main,
    "generation": generation.main,
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:] if sys.argv[1:2] and sys.argv[1] in MAINS else ["record", *sys.argv[1:]]
    raise SystemExit(MAINS[name](arguments))
