"""torch.distributed on tensors of the device: collectives are recorded, and run inside the step.

PyTorch hands every collective to its dispatcher (operators of the namespace `c10d`) before a process group sees it.
`kernels.py` has their kernels for tarry: most record an operator of ours (`operators.py`), so that a training step
with its reductions stays one graph; messages from rank to rank, which another process waits for, end the step
(`messages.py`).

A collective is *started* where it stands and *waited for* where its result is first read, or at the end of the step:
what comes between overlaps with it. `backends/partition.py` arranges compiled steps such that something does.

Three rules keep ranks together:

- **Order.** All collectives of a device write the same small tensor, its *order*. So each one depends on the one
  before, none is dead, and whatever computes a step - the reference path or a compiled program - runs them in the
  order of the program.
- **Agreement.** Before collectives run, the ranks of a group compare what they are about to do, as far as each has
  recorded it (`agreement.py`). Where they differ, all ranks raise.
- **No second run.** A step whose program fails after a collective has run is not computed again: other ranks would not.

What is done on tensors of the CPU with the same groups waits until recorded collectives have run (`kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["install", "of_other_threads"]


def install(
    synchronize: Callable[[], None],
    reduction: Callable[[Any], tuple[int, Any]],
    place: Callable[[], str],
    leave: Callable[[float], bool],
    work: Callable[[Any], Any],
) -> None:
    """Register the kernels and the process groups' backend `tarry`; in a PyTorch without torch.distributed, nothing.

    `synchronize` computes all that is pending and waits for it. `reduction` looks into a boxed `ReduceOp`. `place` is
    the user's line. `leave` is asked for each collective that was started, by its ticket: whether what runs it waits
    for it later. `work` makes a boxed `Work` of results, which is done."""
    if dist.is_available():
        from tarry.distributed import batch_norm, kernels

        batch_norm.install()
        kernels.install(synchronize, reduction, place, leave, work)


def of_other_threads() -> bool:
    """Whether collectives are pending that this thread must not run: others have recorded them."""
    if not dist.is_available():
        return False
    from tarry.distributed import groups

    return groups.of_other_threads()
