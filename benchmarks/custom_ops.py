"""What a call of a custom operator costs, against a hand-written `define` and `impl`, and torch.library.custom_op.

    python -m benchmarks custom-ops                  # the table
    python -m benchmarks custom-ops --json out.json  # and every sample

All have the same kernel in Python, which makes an empty tensor. tarry's and torch.library's have a gradient registered,
and no argument requires one; the hand-written pair has none. They take turns within each round, in the same process.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._report import show, write_json

Call = Callable[[Tensor, Tensor], Any]
HAND, PEER = "define+impl", "torch.library"


def kernel(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


def by_hand() -> Any:
    library = torch.library.Library("benchmark_hand", "FRAGMENT")
    library.define("f(Tensor x, Tensor y) -> Tensor")
    library.impl("f", kernel, "CPU")
    library.impl("f", kernel, "Meta")
    by_hand.library = library  # type: ignore[attr-defined] # it lives as long as its operator
    return torch.ops.benchmark_hand.f.default


def by_torch() -> Any:
    @torch.library.custom_op("benchmark_torch::f", mutates_args=(), device_types="cpu")
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.empty_like(x)

    f.register_fake(kernel)
    f.register_autograd(lambda ctx, grad: (grad, grad))
    return f


def by_tarry() -> Any:
    import tarry

    @tarry.custom_op("benchmark_tarry::f")
    def f(x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    f.impl("cpu")(kernel)
    f.impl_abstract()(kernel)
    f.impl_save_for_backward()(lambda inputs, output: None)
    f.impl_backward()(lambda ctx, saved, grad: {"x": grad, "y": grad})
    return f


def cases() -> dict[str, dict[str, Call]]:
    """Case -> peer -> what is called. Operators can be called as objects, and by name as `torch.ops` finds them."""
    hand, theirs, ours = by_hand(), by_torch(), by_tarry()
    return {
        "call": {HAND: hand, PEER: theirs, "tarry": ours},
        "torch.ops": {
            HAND: torch.ops.benchmark_hand.f,
            PEER: torch.ops.benchmark_torch.f,
            "tarry": torch.ops.benchmark_tarry.f,
        },
    }


def measure(rounds: int, length: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds per call: case -> peer -> one per round. And of recording: on tarry, where nothing is computed."""
    import tarry

    table = cases()
    x, y = torch.ones(8), torch.ones(8)
    samples: dict[str, dict[str, list[float]]] = {case: {peer: [] for peer in row} for case, row in table.items()}
    recorded = {HAND: table["call"][HAND], "tarry": table["call"]["tarry"]}
    samples["recorded"] = {peer: [] for peer in recorded}
    lazy_x, lazy_y = x.to("tarry"), y.to("tarry")
    gc.collect()
    gc.disable()  # a collection would fall on one peer or another by chance
    try:
        for number in range(-2, rounds):  # the first two fill caches and are thrown away
            for case, row, arguments in (
                *((case, row, (x, y)) for case, row in table.items()),
                ("recorded", recorded, (lazy_x, lazy_y)),
            ):
                for peer, call in row.items():
                    seconds = _time(call, *arguments, length)
                    if number >= 0:
                        samples[case][peer].append(seconds / length * 1e6)
                tarry.mark_step()
            gc.collect()
    finally:
        gc.enable()
    return samples


def _time(call: Call, x: Tensor, y: Tensor, length: int) -> float:
    begin = time.perf_counter()
    for _ in range(length):
        call(x, y)
    return time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks custom-ops",
        description="Cost of a call of a custom operator, against define + impl and torch.library.custom_op.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=60, help="rounds; the table shows their medians")
    parser.add_argument("--length", type=int, default=500, help="calls in a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    samples = measure(options.rounds, options.length)
    notes = [
        f"medians of {options.rounds} rounds of {options.length} calls ± half the quartile gap",
        "call: the operator as an object; torch.ops: by name; recorded: on tarry, where nothing is computed",
    ]
    show(f"cost per call, torch {torch.__version__}", samples, [HAND, PEER, "tarry"], "µs", notes)
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        write_json(options.json, "custom_ops", "us", samples, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
