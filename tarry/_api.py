"""The public functions, bound to the one runtime of the process. Importing this module registers the device."""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch

from tarry import device, events, metrics
from tarry.backends import registry
from tarry.backends.base import Backend, Policy
from tarry.codegen.op_table import Kind, load_table
from tarry.config import config
from tarry.device.optimizer import StepHooks
from tarry.native import C
from tarry.replay.function import OnDeviation, StepFunction, is_inside
from tarry.replay.verification import Verify
from tarry.runtime.runtime import Runtime
from tarry.tracebacks import leave

if TYPE_CHECKING:
    from tarry.ir.graph import Graph

P = ParamSpec("P")
T = TypeVar("T")
_runtime = Runtime()
_log = logging.getLogger("tarry")


def _boundary(function: Callable[P, T]) -> Callable[P, T]:
    """A function at which errors leave tarry for the program."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        handled = sys.exc_info()[1]
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise leave(error, handled)  # noqa: B904 - it is the same error

    return call


def set_backend(
    backend: str | Backend | Callable[..., Any] | None,
    device: str | None = None,
    *,
    compile: Policy | None = None,  # noqa: A002 - it is what the setting is called
) -> None:
    """Choose what compiles and runs the steps, and on which real device ("cpu", "cuda:0").

    `backend` is a name ("inductor", "torchscript", "eager", "xla", "dynamo:openvino"), a `tarry.Backend` instance, a
    function that torch.compile would take as its backend, or None for the best that works here. `compile` says what a
    step does whose graph has no program yet: "wait" for it, run on the reference path while it is compiled in the
    "background", or "never" compile; None: what `tarry.config.compile` says, or else the backend.
    """
    _runtime.set_backend(backend, device, compile)


def get_backend() -> Backend:
    """The backend in use."""
    return _runtime.backend


def register_backend(name: str, factory: Callable[..., Backend]) -> None:
    """Make a backend known under a name, for `set_backend(name)`."""
    registry.register(name, factory)


@_boundary
def mark_step(wait: bool = False) -> None:
    """End the step here: compute everything that is pending. `optimizer.step()` does so by itself."""
    _runtime.sync_all("mark_step", awaited=wait)
    if wait:
        _runtime.wait()


@_boundary
def sync(*tensors: torch.Tensor) -> None:
    """Have these tensors computed (and with them all that is pending); without arguments, all that is pending."""
    _runtime.materialise(tensors)


@_boundary
def wait() -> None:
    """Wait for what is in flight, and for step closures."""
    _runtime.wait()


def wait_for_compiles(timeout: float | None = None) -> bool:
    """Wait until nothing is being compiled in the background; False if that took longer than `timeout` seconds. What
    was compiled takes over with the next step. For benchmarks and tests: a program need not wait."""
    return _runtime.wait_for_compiles(timeout)


def no_recompile() -> AbstractContextManager[None]:
    """`with tarry.no_recompile():` a step whose graph has no program, and none on the way, raises
    `tarry.RecompileError`, which says why the graph is new. Nothing is lost by that: the step is computed after the
    block."""
    return _runtime.no_recompile()


def add_step_closure(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Call `function` with host copies of `tensors` once the step that computes them is done, without stalling it.

    `tarry.add_step_closure(lambda loss: print(loss.item()), loss)` logs a loss without reading it in the step.
    If the step fails, it is called if all of `tensors` could be computed, and not at all otherwise.
    """
    _runtime.add_step_closure(function, tensors)


# The name is torch.compile's, which this takes the place of; nothing here needs the built-in one.
@overload
def compile(  # noqa: A001
    fn: Callable[P, T], *, warm_up: int = 2, verify: Verify = None, on_deviation: OnDeviation = "raise"
) -> StepFunction[P, T]: ...
@overload
def compile(  # noqa: A001
    fn: None = None, *, warm_up: int = 2, verify: Verify = None, on_deviation: OnDeviation = "raise"
) -> Callable[[Callable[P, T]], StepFunction[P, T]]: ...
def compile(  # noqa: A001
    fn: Any = None, *, warm_up: int = 2, verify: Verify = None, on_deviation: OnDeviation = "raise"
) -> Any:
    """Replay a step function without running its Python, once `warm_up` calls in a row have done the same.

        step = tarry.compile(train_step)   # or @tarry.compile above its definition
        loss = step(x, y)

    A call is recorded if its arguments or something else that guards see are others than before. Of those that could be
    replayed, some are recorded all the same, and compared with the replay: every one with `verify=1`, none with
    `verify=0`, else many at first and one in 128 or so later. One that did otherwise raises `tarry.ReplayError`;
    with `on_deviation="warn"` it warns, and all further calls are recorded. `step.explain()` says what happens and
    why; see docs/replay.md for what a compiled function may depend on.
    """
    if fn is None:
        return functools.partial(compile, warm_up=warm_up, verify=verify, on_deviation=on_deviation)
    if not callable(fn):
        raise TypeError(f"tarry.compile takes a function, not {type(fn).__name__}")
    if isinstance(warm_up, bool) or not isinstance(warm_up, int) or warm_up < 1:
        raise ValueError(f"tarry.compile: warm_up is a number of calls, 1 or more, not {warm_up!r}")
    if verify not in (None, 0, 1):
        raise ValueError(f"tarry.compile: verify is 1 (every call), 0 (none) or None (some), not {verify!r}")
    if on_deviation not in ("raise", "warn"):
        raise ValueError(f'tarry.compile: on_deviation is "raise" or "warn", not {on_deviation!r}')
    return StepFunction(_runtime, fn, warm_up, verify, on_deviation)


def forget_replays() -> None:
    """Functions of `tarry.compile` have to be recorded again: what they record may be another graph now."""
    _runtime.generation += 1


def graph(*tensors: torch.Tensor, stage: str = "recorded") -> Graph:
    """The graph that would compute these tensors, without computing it."""
    from tarry.ir.build import from_raw
    from tarry.passes.pipeline import run

    if not tensors:
        raise TypeError("tarry.graph() takes the tensors whose graph you want to see")
    return run(from_raw(_runtime.peek(list(tensors))), stage)


def explain(*tensors: torch.Tensor, stage: str = "recorded") -> str:
    """The graph that would compute these tensors, as text, at a stage of its way to the backend; "compiled" is what the
    backend makes of it."""
    from tarry.ir.text import to_text

    if stage == "compiled":
        return _runtime.compiled_text(list(tensors))
    return to_text(graph(*tensors, stage=stage))


def _on_config(name: str, value: Any) -> None:
    if name == "compile":
        _runtime.on_policy()
        return
    if name == "fallback":
        C.set_watched("fallback", value == "error")
        return
    if name == "save_graphs":
        C.set_watched("writer", value is not None)
        return
    forget_replays()
    if name == "force_fallback":
        C.set_forced_eager(_overloads(value))
    elif name == "full_tracebacks":
        C.set_keeps_frames(value)
    elif name == "max_pending_nodes":
        C.set_max_pending(value)
    elif name == "max_pending_bytes":
        C.set_max_pending_bytes(value)
    elif name == "run_ahead":
        C.set_run_ahead(value)


def _overloads(names: frozenset[str]) -> list[str]:
    """All operators that these names fit: of "aten::sub", every overload."""
    fitting: dict[str, list[str]] = {name: [] for name in names}
    for entry in load_table(config.cache_dir) if names else ():
        for name in (entry.name, entry.name.partition(".")[0]):
            if name in fitting and entry.kind is not Kind.DECOMPOSE:
                fitting[name].append(entry.name)
    for name, found in fitting.items():
        if not name.startswith("aten::"):
            found.append(name)  # a custom operator, which may be defined later
        elif not found:
            raise ValueError(
                f"tarry.config.force_fallback: {name!r} fits no operator that is recorded. Names are those that "
                f"print(tarry.explain(x)) shows; operators that PyTorch makes of others (aten::matmul) are not there."
            )
    return sorted({name for found in fitting.values() for name in found})


class _Steps:
    """What happens around `optimizer.step()`: see device/optimizer.py."""

    @_boundary
    def cut(self) -> None:
        if config.cut_after_optimizer and not is_inside():
            _runtime.sync_all("optimizer.step", awaited=False)

    @_boundary
    def finish(self) -> None:
        _runtime.finish_all()

    def lane(self) -> int:
        return C.current_lane()

    def failed(self, lane: int) -> list[tuple[int, int]]:
        return C.failed_steps(lane)

    def epochs(self) -> list[int]:
        return [C.epochs(index)[0] for index in range(C.device_count())]

    def computed(self, epochs: list[int]) -> bool:
        return all(C.epochs(index)[1] > epoch for index, epoch in enumerate(epochs))


@_boundary
def _synchronize() -> None:
    _runtime.sync_all("synchronize")
    _runtime.wait()


def _counters() -> dict[str, int]:
    total: Counter[str] = Counter()
    for index in range(C.device_count()):
        total.update(C.counters(index))
    return dict(total)


def _fallbacks() -> list[tuple[str, str, int, int]]:
    return [found for index in range(C.device_count()) for found in C.fallbacks(index)]


def _seconds() -> dict[str, float]:
    total: Counter[str] = Counter()
    for index in range(C.device_count()):
        total.update(C.seconds(index))
    return dict(total)


def _reset_counters() -> None:
    for index in range(C.device_count()):
        C.reset_counters(index)


def _at_exit() -> None:
    """Let the autograd engine's thread drop what it still holds of the last backward pass.

    It needs the GIL for that; one that asks for the GIL once the interpreter is shutting down is killed in the middle
    of a destructor, and takes the process with it. Sleeping hands the GIL over.
    """
    if device.module.is_initialized():
        time.sleep(0.01)
    if not C.is_used() and _is_program():
        _log.warning("tarry: nothing was recorded: no tensor was put on device 'tarry'. See docs/run.md: tarry run")
    _boundary(_runtime.close)()


def _is_program() -> bool:
    """Whether this process is one that a user has started, and not a command of tarry's or a worker."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    is_ours = spec is not None and spec.name.partition(".")[0] in ("tarry", "benchmarks", "pytest")
    is_ours = is_ours or "tarry.cli" in sys.modules  # which says more
    return not (is_ours or multiprocessing.parent_process() or C.in_bad_fork() or sys.flags.interactive)


def _install() -> None:
    for package in (Path(torch.__file__).parent, Path(__file__).parent):
        C.add_internal_path(f"{package}/")
    C.set_callbacks(
        _runtime.on_sync,
        _runtime.on_batch,
        _runtime.on_failure,
        _runtime.on_program_failure,
        _runtime.on_fallback,
        _runtime.on_read,
    )
    events.attach(functools.partial(C.set_watched, "subscriber"))
    for entry in load_table(config.cache_dir):
        if entry.kind in (Kind.RECORD, Kind.KERNEL):
            C.register_operator(entry.name, entry.flags, entry.kind is Kind.KERNEL)
    device.install(C, synchronize=_synchronize)
    hooks = StepHooks(_Steps())
    hooks.guard_grad_scaler()
    _runtime.after_finish = hooks.settle
    device.module.attach(_runtime.seed, _runtime.memory_info)
    metrics.attach(_counters, _fallbacks, _seconds, _reset_counters, _runtime.backend_metrics)
    config.subscribe(_on_config)
    atexit.register(_at_exit)


_install()
