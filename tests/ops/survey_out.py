"""``out=`` of every operator in OpInfo, in all forms: ``python -m tests.ops.survey_out --device tarry``."""

from __future__ import annotations

import argparse
import collections
import gc
from typing import Any

from tests.support.pool import Retire, run_pool

_state: dict[str, Any] = {}


def _setup(device: str, backend: str | None, dtype: str, samples: int, pattern: str, large: bool) -> None:
    import torch

    torch.set_num_threads(1)
    from tests.support import load_device

    load_device(device, backend)
    if large:
        from tarry.native import C

        C.set_small_call(-1)
    from tests.ops.check import all_ops, dtype_named

    _state["ops"] = all_ops(dtype_named(dtype), pattern)
    _state.update(device=device, dtype=dtype_named(dtype), samples=samples)


def _work(name: str) -> list[str]:
    from tests.ops.out_arguments import check
    from tests.support import reset_device

    found = check(_state["ops"][name], _state["dtype"], _state["device"], _state["samples"])
    try:
        gc.collect()
        reset_device(_state["device"])
    except Exception:  # a step that fails stays pending as long as its tensors live
        raise Retire(found) from None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="tarry")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="the most that one operator may take")
    parser.add_argument(
        "--large", action="store_true", help="as if all calls were too large to be tried on the real kernel"
    )
    parser.add_argument("pattern", nargs="?", default="")
    options = parser.parse_args()
    from tests.ops.check import all_ops, dtype_named

    names = [name for name, op in all_ops(dtype_named(options.dtype), options.pattern).items() if op.supports_out]
    arguments = (options.device, options.backend, options.dtype, options.samples, options.pattern, options.large)
    forms: collections.Counter[str] = collections.Counter()
    wrong = 0
    for outcome in run_pool(
        names, _work, setup=_setup, setup_args=arguments, jobs=options.workers, timeout=options.seconds
    ):
        lines = [outcome.crash] if outcome.crash else outcome.value
        wrong += bool(lines)
        for line in lines:
            forms[line.split(",")[0]] += 1
            print(f"{outcome.task}: {line}", flush=True)
    print(f"{len(names) - wrong} of {len(names)} operators agree; differences by form: {dict(forms.most_common())}")


if __name__ == "__main__":
    main()
