"""Ranks of small training programs that die, fail or differ at a random step: how long until each rank has its error.

    python -m tests.distributed.faults [--runs 50] [--seed 0] [--only killed branch] [--backends eager] [--limit 60]

Runs come one after the other, and a table says what happened on each rank: the first line of its error, and how many
seconds after the fault. A rank that has not ended at the limit is `HANGS`, and one that trains on as if nothing had
happened is `no error`. Both make the program end with 1; but ranks of faults that only make a rank late train to their
end.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.models import GPT, gpt, loss_of, texts
from tests.distributed.world import free_port

STEPS = 12
PROGRAMS = ("ddp", "fsdp", "tp")
BACKENDS = ("eager", "torchscript", "inductor")


def model_of(program: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: GPT = gpt("tarry")
    if program == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    mesh = init_device_mesh("tarry", (dist.get_world_size(),))
    if program == "tp":
        from tests.distributed.test_four_ranks import tensor_parallel

        return tensor_parallel(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# ---- faults: called on one rank, within a step; those that return let the step go on


def killed(loss: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_soon(loss: Tensor) -> None:
    """At any moment of the steps that follow."""
    if os.fork() == 0:
        time.sleep(random.uniform(0, 0.2))
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)


def raises(loss: Tensor) -> None:
    raise ValueError("a batch cannot be read")


def fails_in_the_step(loss: Tensor) -> None:
    """An operator of the device, which runs later."""
    loss.add_(loss.expand(3).index_select(0, torch.tensor([7]).to("tarry")).sum())


def exits(loss: Tensor) -> None:
    sys.exit(3)


def interrupted(loss: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def destroys_its_groups(loss: Tensor) -> None:
    dist.destroy_process_group()
    time.sleep(1)
    raise SystemExit


def one_more(loss: Tensor) -> None:
    dist.all_reduce(loss.detach().clone())


def a_barrier_more(loss: Tensor) -> None:
    dist.barrier()


def objects_more(loss: Tensor) -> None:
    dist.all_gather_object([None] * dist.get_world_size(), 1)


def branch(loss: Tensor) -> None:
    """One that is taken on one rank only, and reads."""
    if float(loss) > -1:
        dist.broadcast(loss.detach().clone(), 0)


def ahead(loss: Tensor) -> None:
    """It leaves its loop early, while the others have a step to go."""
    raise StopIteration


def sleeps(loss: Tensor) -> None:
    time.sleep(5)


def slow_compiles(loss: Tensor) -> None:
    """Other shapes on one rank only: it compiles what the others have not."""
    (torch.ones(3, 5, device="tarry") @ torch.ones(5, 2, device="tarry")).relu().sum().item()
    time.sleep(2)


# ---- faults of all ranks at once, which differ by rank


def other_shapes(loss: Tensor) -> None:
    dist.all_reduce(torch.ones(3 + dist.get_rank(), device="tarry"))


def other_dtypes(loss: Tensor) -> None:
    dist.all_reduce(torch.ones(3, device="tarry", dtype=torch.float64 if dist.get_rank() else torch.float32))


def other_reductions(loss: Tensor) -> None:
    dist.all_reduce(torch.ones(3, device="tarry"), dist.ReduceOp.SUM if dist.get_rank() else dist.ReduceOp.MAX)


def other_roots(loss: Tensor) -> None:
    dist.broadcast(torch.ones(3, device="tarry"), dist.get_rank() % 2)


def other_orders(loss: Tensor) -> None:
    x, y = torch.ones(3, device="tarry"), torch.ones(5, device="tarry")
    for tensor in (x, y) if dist.get_rank() else (y, x):
        dist.all_reduce(tensor)


def other_groups(loss: Tensor) -> None:
    both = [_second_group, dist.group.WORLD]
    for group in both if dist.get_rank() else both[::-1]:
        dist.all_reduce(torch.ones(3, device="tarry"), group=group)


def all_interrupted(loss: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGINT)


_second_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Fault:
    happen: Callable[[Tensor], None]
    everywhere: bool = False
    harmless: bool = False  # a rank is late
    at_any_time: bool = False  # perhaps after all is done
    may_go_on: bool = False  # all ranks together: the order within each group is the same on all

    @property
    def name(self) -> str:
        return self.happen.__name__


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(killed_soon, at_any_time=True),
        *map(Fault, (killed, raises, fails_in_the_step, exits, interrupted, destroys_its_groups)),
        *map(Fault, (one_more, a_barrier_more, objects_more, branch, ahead)),
        *(Fault(late, harmless=True) for late in (sleeps, slow_compiles)),
        *(Fault(each, everywhere=True) for each in (other_shapes, other_dtypes, other_reductions, other_roots)),
        *(Fault(each, everywhere=True) for each in (other_orders, all_interrupted)),
        Fault(other_groups, everywhere=True, may_go_on=True),
    )
}


# ---- a rank


def train(program: str, fault: Fault, step: int, culprit: int, reads: bool, folder: Path) -> None:
    """Steps until the fault ends them."""
    global _second_group
    import tarry  # noqa: F401 - the device

    torch.set_num_threads(1)
    dist.init_process_group()
    _second_group = dist.new_group()
    rank = dist.get_rank()
    model = model_of(program)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    random.seed(step + rank)
    torch.manual_seed(0 if program == "tp" else rank)
    for k in range(STEPS):
        x, y = texts("tarry")
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        if k == step and (fault.everywhere or rank == culprit):
            (folder / f"fault {rank}").touch()
            try:
                fault.happen(loss)
            except StopIteration:
                break
        loss.backward()
        optimizer.step()
        if reads:
            loss.item()
    loss.item()
    dist.destroy_process_group()


# ---- runs


@dataclass(frozen=True)
class Run:
    program: str
    backend: str
    size: int
    fault: Fault
    step: int
    culprit: int
    reads: bool

    def __str__(self) -> str:
        where = "all" if self.fault.everywhere else f"rank {self.culprit}"
        how = "loss read" if self.reads else "not read"
        return f"{self.program:5}{self.backend:12}{self.size} ranks  {self.fault.name} at {self.step} on {where}, {how}"

    def outcomes(self, limit: float) -> list[str]:
        """Of each rank: what it ended with, and when."""
        with tempfile.TemporaryDirectory() as name:
            folder, port = Path(name), str(free_port())
            arguments = (self.program, self.fault.name, self.step, self.culprit, int(self.reads), folder)
            ranks = []
            for rank in range(self.size):
                environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(self.size), "MASTER_PORT": port}
                environment |= {"MASTER_ADDR": "127.0.0.1", "TARRY_BACKEND": self.backend, "OMP_NUM_THREADS": "1"}
                environment["PYTHONFAULTHANDLER"] = "1"
                command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "rank", *map(str, arguments)]
                with (folder / f"errors {rank}").open("w") as errors:
                    ranks.append(subprocess.Popen(command, env=environment, stdout=errors, stderr=errors))
            ends: dict[int, float] = {}
            began = time.time()
            while len(ends) < self.size and time.time() - began < limit:
                ends |= {k: time.time() for k, rank in enumerate(ranks) if k not in ends and rank.poll() is not None}
                time.sleep(0.05)
            for rank_ in ranks:
                rank_.send_signal(signal.SIGABRT)  # has a rank that hangs print where
            time.sleep(1)
            for rank_ in ranks:
                rank_.kill()
                rank_.wait()
            happened = [each.stat().st_mtime for each in folder.glob("fault *")]
            return [
                self._outcome(k, ends, min(happened, default=0.0), ranks[k].returncode, folder)
                for k in range(self.size)
            ]

    def _outcome(self, rank: int, ends: dict[int, float], fault: float, code: int, folder: Path) -> str:
        errors = (folder / f"errors {rank}").read_text(errors="replace")
        if rank not in ends:
            return f"HANGS {errors[-4000:]}"
        if not fault:
            return f"ended before the fault: {errors[-2000:]}"
        seconds = f"{ends[rank] - fault:5.1f} s"
        if code == 0:
            return f"{seconds}  no error"
        unmarked = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in errors.splitlines()]
        lines = [line for line in unmarked if line and not line[0].isspace()]
        errors_only = [
            line for line in lines if re.match(r"[\w.]+Error\b", line) or line.startswith("KeyboardInterrupt")
        ]
        return f"{seconds}  {(errors_only or lines or [f'code {code}'])[-1][:150]}"

    def is_wrong(self, outcomes: list[str]) -> bool:
        ends = [k for k, text in enumerate(outcomes) if text.endswith("no error")]
        if any("HANGS" in text or "before the fault" in text for text in outcomes):
            return True
        if self.fault.harmless:
            return len(ends) < self.size
        if self.fault.may_go_on and len(ends) == self.size:
            return False
        return not self.fault.at_any_time and any(k != self.culprit or self.fault.everywhere for k in ends)


def drawn(count: int, seed: int, faults: list[str], backends: list[str], programs: list[str]) -> list[Run]:
    """Each fault in turn; all else by chance."""
    chance = random.Random(seed)
    runs = []
    for k in range(count):
        size = chance.choice((2, 2, 4))
        fault, backend, program = FAULTS[faults[k % len(faults)]], chance.choice(backends), chance.choice(programs)
        step = chance.randrange(STEPS - 2)
        runs.append(Run(program, backend, size, fault, step, chance.randrange(size), chance.random() < 0.5))
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a run may take")
    options = parser.parse_args()
    wrong = 0
    for run in drawn(options.runs, options.seed, options.only, options.backends, options.programs):
        outcomes = run.outcomes(options.limit)
        wrong += run.is_wrong(outcomes)
        print(f"{'WRONG' if run.is_wrong(outcomes) else 'ok':6}{run}", *outcomes, sep="\n        ", flush=True)
    print(f"{wrong} of {options.runs} runs are wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _, _, program_, fault_, step_, culprit_, reads_, folder_ = sys.argv
        train(program_, FAULTS[fault_], int(step_), int(culprit_), reads_ == "1", Path(folder_))
    else:
        raise SystemExit(main())
