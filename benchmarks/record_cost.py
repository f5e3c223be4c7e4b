"""What one recorded operator costs, against eager PyTorch's dispatch and the Lazy Tensor Core's recording.

    python -m benchmarks                        # the table
    python -m benchmarks record --json out.json # and every sample

A case is a chain of operators on 8x8 tensors, so small that the arithmetic is nothing and the overhead all. The peers
take turns within each round, in the same process: what slows the machine down slows all of them.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._peers import Eager, LazyTensorCore, Peer, Tarry, started
from benchmarks._report import show, write_json


@dataclass(frozen=True)
class Case:
    """A chain: `step(z, a)` is applied `length` times, beginning with `first(a)`."""

    name: str
    step: Callable[[Tensor, Tensor], Tensor]
    requires_grad: bool = False
    first: Callable[[Tensor], Tensor] = lambda a: a


def cases() -> list[Case]:
    steps: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "add": lambda z, a: z.add(a),
        "mm": lambda z, a: z.mm(a),
        "view": lambda z, a: z.view(8, 8),
        "add_": lambda z, a: z.add_(a),
    }
    result = []
    for name, step in steps.items():
        for grad in (False, True):
            # A leaf that requires grad cannot be changed in place, and a clone keeps the others' leaf unchanged.
            first = Tensor.clone if name == "add_" else lambda a: a
            result.append(Case(f"{name}{' + grad' if grad else ''}", step, grad, first))
    return result


def chain(case: Case, leaf: Tensor, length: int) -> tuple[float, Tensor]:
    """Seconds for the chain (not for its first tensor), and the last tensor, still pending where it is lazy."""
    step, z = case.step, case.first(leaf)
    begin = time.perf_counter()
    for _ in range(length):
        z = step(z, leaf)
    return time.perf_counter() - begin, z


def leaf_for(case: Case, peer: Peer) -> Tensor:
    torch.manual_seed(0)
    leaf = (torch.randn(8, 8) / 8).to(peer.device)  # products of such matrices stay finite
    peer.cut()
    return leaf.requires_grad_(case.requires_grad)


def measure(peers: Sequence[Peer], rounds: int, length: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds per operator: case -> peer -> one per round."""
    table = cases()
    samples: dict[str, dict[str, list[float]]] = {case.name: {peer.name: [] for peer in peers} for case in table}
    sync = f"sync, {length} adds"
    samples[sync] = {peer.name: [] for peer in peers if peer.lazy}
    leaves = {(case.name, peer.name): leaf_for(case, peer) for case in table for peer in peers}
    gc.collect()
    gc.disable()  # a collection would fall on one peer or another by chance
    try:
        for number in range(-2, rounds):  # the first two fill caches and are thrown away
            for case in table:
                for peer in peers:
                    seconds, last = chain(case, leaves[case.name, peer.name], length)
                    if number >= 0:
                        samples[case.name][peer.name].append(seconds / length * 1e6)
                    del last  # dropped before the cut: nothing is live, so nothing is run
                    peer.cut()
            for peer in peers:
                if not peer.lazy:
                    continue
                for repeat in range(4):  # a loop, as a program has it: the first turn after another peer's runs cold
                    _, last = chain(table[0], leaves["add", peer.name], length)
                    begin = time.perf_counter()
                    peer.cut()
                    seconds = time.perf_counter() - begin
                    if number >= 0 and repeat > 0:
                        samples[sync][peer.name].append(seconds / length * 1e6)
                    del last
            gc.collect()
    finally:
        gc.enable()
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks record",
        description="Cost of one recorded operator on tarry, against eager PyTorch and the Lazy Tensor Core.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=60, help="rounds; the table shows their medians")
    parser.add_argument("--length", type=int, default=200, help="operators in a chain")
    parser.add_argument("--device", default="cpu", help="the real device")
    parser.add_argument("--backend", default="eager", help="tarry's backend")
    parser.add_argument("--without", nargs="*", default=[], metavar="PEER", help="leave out: eager, LTC, tarry")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    everyone: list[Peer] = [Eager(options.device), LazyTensorCore(), Tarry(options.backend, options.device)]
    peers = started([peer for peer in everyone if peer.name not in options.without])
    samples = measure(peers, options.rounds, options.length)
    show(
        f"cost per operator, torch {torch.__version__}, real device {options.device}, backend {options.backend}",
        samples,
        [peer.name for peer in peers],
        "µs",
        [
            f"medians of {options.rounds} rounds of {options.length} operators on 8x8 tensors ± half the quartile gap",
            "eager computes, the others record; sync: a cached graph's run, per node",
        ],
    )
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        write_json(options.json, "record_cost", "us", samples, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
