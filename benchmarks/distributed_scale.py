"""What a rank of a large world does in a training step: its collectives, its memory, and what compiling takes.

    python -m benchmarks distributed-scale [--ranks 8 64 1024] [--parallel ddp fsdp tp] [--backend inductor]

One process is rank 0 of a world whose other ranks do not exist: PyTorch's fake process group takes part in every
collective at once, and sends nothing. What a step computes is garbage; its graph, its programs and the sizes of all
tensors are those of a real rank. So counts and bytes are exact. Peak memory is measured in a step that runs
(`torch.tarry.max_memory_allocated`). Time is what the first steps take until all is compiled, with an empty cache.
Waiting for others cannot be seen here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PARALLEL = {
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "tp": "TP 8 x DDP",
}
TENSOR_PARALLEL = 8
"""Ranks that share a layer, with `tp`; the others are replicas."""
STEPS = 4
"""Until all is compiled: optimizers make their state in the first step, DDP its buckets in the second."""


@dataclass(frozen=True)
class Shape:
    """Of the model, and of a rank's batch."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    vocabulary: int = 8192
    batch: int = 2
    length: int = 128


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.head = width // shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        # A rank of tensor parallelism has some of the heads.
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Parameter(torch.zeros(shape.length, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _ddp(model: GPT, ranks: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp(model: GPT, ranks: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("tarry", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tp(model: GPT, ranks: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("tarry", (ranks // TENSOR_PARALLEL, TENSOR_PARALLEL), mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan | {"out": RowwiseParallel(), "down": RowwiseParallel()})
    if ranks > TENSOR_PARALLEL:
        replicated(model, mesh["dp"].get_group())
    return model


def replicated(model: nn.Module, group: Any) -> None:
    """Average the gradients over replicas, one by one as they come: DDP does not take DTensors of a mesh's part."""
    import torch.distributed as dist

    def reduce(parameter: Tensor) -> None:
        grad: Any = parameter.grad
        dist.all_reduce(getattr(grad, "_local_tensor", grad), dist.ReduceOp.AVG, group=group, async_op=True)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)


MAKE: dict[str, Callable[[GPT, int], nn.Module]] = {"ddp": _ddp, "fsdp": _fsdp, "tp": _tp}


def sent(op: str, size: int, ranks: int) -> float:
    """The bytes that a rank sends in a collective of `size` bytes in all, if it goes round a ring."""
    return size * (ranks - 1) / ranks * (2 if op.startswith("all_reduce") else 1)


def measure(parallel: str, ranks: int, backend: str, shape: Shape) -> dict[str, Any]:
    """A row of the table, in this process."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import tarry

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tarry.set_backend(backend)
    tarry.config.compile = "wait"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    model = MAKE[parallel](GPT(shape).to("tarry"), ranks)
    # With tensor parallelism, only some parameters are DTensors, which lists of one kind cannot have.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=parallel != "tp")

    def step() -> None:
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1)).to("tarry")
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    tarry.wait()
    first = time.perf_counter() - start
    torch.tarry.reset_peak_memory_stats()  # type: ignore[attr-defined]
    before = dict(tarry.metrics.counters())
    with tarry.events.record() as seen:
        step()
        tarry.wait()
    counters = tarry.metrics.counters()
    done = [event.fields for event in seen if event.kind == "collective"]
    dist.destroy_process_group()
    return {
        "collectives": len(done),
        "sent": sum(sent(event["op"], event["bytes"], event["ranks"]) for event in done),
        "peak": torch.tarry.max_memory_allocated(),  # type: ignore[attr-defined]
        "first_steps": first,
        "compiles": counters.get("compile", 0),
        "again": counters.get("compile", 0) - before.get("compile", 0),
        "steps": sum(event.kind == "sync" for event in seen),
    }


def _row(parallel: str, ranks: int, options: argparse.Namespace) -> dict[str, Any] | str:
    """A row, from a process of its own with an empty cache; a line that says why if there is none."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TARRY_STORE": "0"}
        shape = [str(options.layers), str(options.width)]
        command = [sys.executable, "-m", "benchmarks.distributed_scale", "--child", parallel, str(ranks), *shape]
        done = subprocess.run(
            [*command, "--backend", options.backend], capture_output=True, text=True, env=environment, check=False
        )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["its process died"])[-1]
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks distributed-scale",
        description="What one rank of a large world does in a training step of a GPT, with a fake process group.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 1024], help="sizes of the world")
    parser.add_argument("--parallel", nargs="+", choices=list(PARALLEL), default=list(PARALLEL), help="which forms")
    parser.add_argument("--backend", default="inductor", help="tarry's backend")
    parser.add_argument("--layers", type=int, default=Shape.layers, help="of the model")
    parser.add_argument("--width", type=int, default=Shape.width, help="of the model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--child", nargs=4, metavar=("PARALLEL", "RANKS", "LAYERS", "WIDTH"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        parallel, ranks, layers, width = options.child
        shape = Shape(layers=int(layers), width=int(width))
        print(json.dumps(measure(parallel, int(ranks), options.backend, shape)))
        return 0
    rows: dict[str, Any] = {}
    print("| | ranks | collectives | sent per rank, MB | peak memory of a rank, MB | first steps, s | compiles |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for parallel in options.parallel:
        for ranks in options.ranks:
            row = rows[f"{parallel} {ranks}"] = _row(parallel, ranks, options)
            if isinstance(row, str):
                cells = [row]
            else:
                sizes = [f"{row['sent'] / 1e6:.1f}", f"{row['peak'] / 1e6:.0f}"]
                cells = [str(row["collectives"]), *sizes, f"{row['first_steps']:.0f}", str(row["compiles"])]
            print(f"| {PARALLEL[parallel]} | {ranks} | {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"backend": options.backend, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
