"""Survey of the model zoo: ``python -m tests.models.survey --device tarry``.

Each model trains three steps and, where it can, generates, on CPU eager and on the device; a child process takes the
crashes. The times are for orientation only: the models are tiny, so they show overhead, not speed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict
from typing import Any

from tests.support.pool import Outcome, run_pool

_state: dict[str, Any] = {}


def _setup(device: str, backend: str | None) -> None:
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from tests.support import load_device

    load_device(device, backend)
    _state["device"] = device


def _work(name: str) -> dict[str, Any]:
    from tests.models.program import compare
    from tests.models.zoo import ZOO

    comparison = compare(ZOO[name], _state["device"])
    return {**asdict(comparison), "trained": comparison.trained, "ok": comparison.ok}


def _row(outcome: Outcome) -> str:
    if outcome.value is None:
        text = (outcome.crash or "").removeprefix("harness error: ")
        return f"{outcome.task:24} FAILED   {text.splitlines()[0][:150] if text else ''}"
    v = outcome.value
    difference = max(v["loss_difference"], v["parameter_difference"])
    tokens = {None: "-", True: "ok", False: "DIFFER"}[v["tokens_agree"]]
    fell = ", ".join(f"{op.removeprefix('aten::')}x{n}" for op, n in sorted(v["fallbacks"].items())) or "-"
    ratio = v["seconds"] / max(v["eager_seconds"], 1e-9)
    trained = "ok" if v["trained"] else "DIFFERS"
    return f"{outcome.task:24} {trained:8} {difference:9.1e}  {tokens:7} {ratio:6.1f}x {v['compiles']:4d}  {fell}"


def summarise(outcomes: list[Outcome], seconds: float) -> str:
    """The report's text."""
    lines = [f"{'model':24} {'train':8} {'max diff':>9}  {'tokens':7} {'time':>7} {'cmpl':>4}  fallbacks"]
    lines += [_row(o) for o in outcomes]
    values = [o.value for o in outcomes if o.value is not None]
    generating = [v for v in values if v["tokens_agree"] is not None]
    lines.append(
        f"trained as eager: {sum(v['trained'] for v in values)}/{len(outcomes)}; "
        f"generated as eager: {sum(v['tokens_agree'] for v in generating)}/{len(generating)}; "
        f"with fallbacks: {sum(bool(v['fallbacks']) for v in values)}; "
        f"failed to run: {len(outcomes) - len(values)}; {seconds:.0f} s"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models.survey", description=__doc__)
    parser.add_argument("--device", default="tarry")
    parser.add_argument("--backend", default=None, help="tarry's backend; its default when absent")
    parser.add_argument("--only", default="", help="regular expression searched in the model's name")
    parser.add_argument("--json", default=None, help="write the details here")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one model")
    options = parser.parse_args(argv)

    from tests.models.zoo import ZOO

    names = [name for name in ZOO if re.search(options.only, name)]
    start = time.monotonic()
    outcomes = []
    for outcome in run_pool(
        names,
        _work,
        setup=_setup,
        setup_args=(options.device, options.backend),
        jobs=options.jobs,
        timeout=options.timeout,
    ):
        outcomes.append(outcome)
        if sys.stderr.isatty():
            print(f"\r{len(outcomes)}/{len(names)} {outcome.task:40.40}", end="", file=sys.stderr)
    outcomes.sort(key=lambda o: names.index(o.task))
    print(summarise(outcomes, time.monotonic() - start))
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(o) for o in outcomes], file, indent=1)
    return 0 if all(o.value is not None and o.value["ok"] for o in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
