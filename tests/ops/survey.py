"""Survey of every operator in PyTorch's OpInfo database: ``python -m tests.ops.survey --device tarry``.

Each operator runs in a child process, so a crash in native code is a line of the report. The numbers it prints are the
device's coverage: forward, backward and in-place passes out of what eager CPU supports, which operators fell back, and
which steps the backend did not compile. Steps wait for their programs, and no stored ones are used.

A compiling backend takes minutes to hours: ``--json FILE`` gets a line for each operator as it ends, and operators that
the file has are not run again. A run that was stopped (``--seconds``, or from outside) goes on with the same command;
``--shard 2/8`` takes every eighth operator, from the second on, and ``--merge`` reports on several files.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import re
import sys
import time
from dataclasses import asdict
from typing import Any

from tests.ops.known_failures import known_failure
from tests.support.pool import Outcome, Retire, run_pool

_state: dict[str, Any] = {}


def _setup(device: str, backend: str | None, dtype: str, samples: int, modes: tuple[str, ...], pattern: str) -> None:
    """In the child, once: the imports are the costly part (the database alone takes seconds)."""
    import torch

    torch.set_num_threads(1)
    from tests.support import load_device

    load_device(device, backend)
    if device == "tarry":
        import tarry
        from tarry.runtime import limits

        # Else graphs as small as these, and those after many like them, run on the reference path for good.
        tarry.config.compile, tarry.config.store = "wait", False
        limits.MAX_VARIANTS = limits.MAX_FIXED_SIZES = limits.MAX_LENGTHS = limits.ALL
    from tests.ops.check import Checker, all_ops, dtype_named

    _state["ops"] = all_ops(dtype_named(dtype), pattern)
    _state["checker"] = Checker(device, dtype_named(dtype), samples, modes)
    _state["device"] = device


def _work(name: str) -> dict[str, Any]:
    from tests.support import counters, fallbacks, reset_device

    device = _state["device"]
    result = _state["checker"].check(_state["ops"][name])
    counted = counters(device)
    result.fallbacks = fallbacks(device)
    result.interpreted = int(counted.get("interpreted", 0) + counted.get("reference", 0))
    result.compiles = int(counted.get("compile", 0))
    try:
        gc.collect()
        reset_device(device)
    except Exception:  # a step that fails stays pending as long as its tensors live; the next operator must not see it
        raise Retire(asdict(result)) from None
    return asdict(result)


def _cause(text: str) -> str:
    """A failure's text without what differs from one instance to the next (numbers, shapes, quoted values)."""
    text = re.sub(r"^sample \d+: ", "", text)
    text = re.sub(r"\[[^\]]*\]|\([\d, ]*\)", "", text)
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", text)[:110]


def summarise(outcomes: list[Outcome], seconds: float) -> str:
    """The report's text."""
    lines: list[str] = []
    reports = [o.value for o in outcomes if o.value is not None]
    for mode in ("forward", "backward", "inplace", "out"):
        ran = [r for r in reports if mode in r["modes"]]
        crashed = len(outcomes) - len(reports) if mode == "forward" else 0
        passed = sum(not r["modes"][mode]["failures"] for r in ran)
        if ran or crashed:
            samples = sum(r["modes"][mode]["samples"] for r in ran)
            lines.append(f"{mode:9} {passed}/{len(ran) + crashed} operators ({samples} samples)")
    fell = {r["name"]: r["fallbacks"] for r in reports if r["fallbacks"]}
    kernels = collections.Counter(k for counts in fell.values() for k in counts)
    lines.append(f"fallback  {len(fell)} operators, {len(kernels)} kernels: " + ", ".join(sorted(kernels)))
    lines.append(f"compiled  {sum(r['compiles'] for r in reports)} programs")
    interpreted = [r["name"] for r in reports if r["interpreted"]]
    lines.append(f"not compiled  {len(interpreted)} operators: " + ", ".join(interpreted))
    crashes = [o for o in outcomes if o.crash]
    lines.append(f"crashes   {len(crashes)}")
    lines += [f"    {o.task}: {o.crash.splitlines()[0] if o.crash else ''}" for o in crashes]
    strides = [r["name"] for r in reports if any(m["stride_notes"] for m in r["modes"].values())]
    lines.append(f"strides differ from eager's: {len(strides)}: " + ", ".join(strides))
    groups: dict[str, list[str]] = collections.defaultdict(list)
    examples: dict[str, str] = {}
    for report in reports:
        for mode, result in report["modes"].items():
            for text in result["failures"][:1]:
                groups[_cause(text)].append(f"{report['name']}({mode})")
                examples.setdefault(_cause(text), text)
    lines.append(f"failures by cause: {sum(map(len, groups.values()))} in {len(groups)} groups")
    for cause, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"  [{len(names)}] {examples[cause][:260]}")
        lines.append("       " + ", ".join(names))
    lines.append(f"{len(outcomes)} operators in {seconds:.0f} s")
    return "\n".join(lines)


class Record:
    """The outcomes so far, and a file of them that is whole at every moment, a line for each."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.outcomes = _read(path) if path and os.path.exists(path) else []

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self.path:
            with open(self.path, "a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


def _read(path: str) -> list[Outcome]:
    """What a file of outcomes has. Its last line may have been cut off."""
    with open(path) as file:
        return [Outcome(**json.loads(line)) for line in file if line.endswith("\n")]


def _run(names: list[str], record: Record, options: argparse.Namespace) -> None:
    """Check the operators ``names`` until all are done or the time is up."""
    modes = tuple(options.modes.split(","))
    setup_args = (options.device, options.backend, options.dtype, options.samples, modes, options.ops)
    start = time.monotonic()
    pool = run_pool(names, _work, setup=_setup, setup_args=setup_args, jobs=options.jobs, timeout=options.timeout)
    for done, outcome in enumerate(pool, 1):
        record.add(outcome)
        if sys.stderr.isatty():
            print(f"\r{done}/{len(names)} {outcome.task:60.60}", end="", file=sys.stderr)
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            break


def _report(outcomes: list[Outcome], names: list[str], dtype: str, seconds: float) -> int:
    """Print what was found of the operators ``names``; the process's status."""
    order = {name: i for i, name in enumerate(names)}
    outcomes = sorted((o for o in outcomes if o.task in order), key=lambda o: order[o.task])
    print(summarise(outcomes, seconds))
    bad = [o.task for o in outcomes if o.crash or any(m["failures"] for m in o.value["modes"].values())]
    unexpected = [name for name in bad if known_failure(name, dtype) is None]
    print(f"known failures: {len(bad) - len(unexpected)}; unexpected: {', '.join(unexpected) or 'none'}")
    missing = order.keys() - {o.task for o in outcomes}
    if missing:
        print(f"not reached: {len(missing)} operators")
    return 1 if unexpected or missing else 0


def _shard(text: str) -> tuple[int, int]:
    """``2/8`` -> (1, 8)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shard; write 2/8 for the second of eight")
    return int(match[1]) - 1, int(match[2])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.survey", description=__doc__)
    parser.add_argument("--device", default="tarry")
    parser.add_argument("--backend", default=None, help="tarry's backend; its default when absent")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ops", default="", help="regular expression searched in the operator's full name")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--modes", default="forward,backward,inplace", help="also: out")
    parser.add_argument("--json", default=None, help="add each operator's outcome to this file; leave out those it has")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one operator")
    parser.add_argument("--seconds", type=float, default=None, help="stop and report after this time")
    parser.add_argument(
        "--shard", type=_shard, default=(0, 1), metavar="I/N", help="every N-th operator, from the I-th"
    )
    parser.add_argument("--merge", nargs="+", default=[], metavar="FILE", help="run nothing; report on these files")
    options = parser.parse_args(argv)

    from tests.ops.check import all_ops, dtype_named

    first, step = options.shard
    names = list(all_ops(dtype_named(options.dtype), options.ops))[first::step]
    start = time.monotonic()
    record = Record(None if options.merge else options.json)
    for path in options.merge:
        record.outcomes += _read(path)
    if not options.merge:
        there = {o.task for o in record.outcomes}
        _run([name for name in names if name not in there], record, options)
    return _report(record.outcomes, names, options.dtype, time.monotonic() - start)


if __name__ == "__main__":
    raise SystemExit(main())
