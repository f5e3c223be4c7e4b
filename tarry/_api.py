"""The public functions, bound to the one runtime of the process. Importing this module registers the device."""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch

from tarry import device, distributed, events, integrations, metrics, places
from tarry.backends import registry
from tarry.backends.base import Backend, Policy
from tarry.codegen.op_table import Kind, load_table
from tarry.config import config
from tarry.device.dynamo import Frame, Recorded, leave_alone
from tarry.device.optimizer import StepHooks
from tarry.events.log import EventLog
from tarry.integrations.after_import import after_import
from tarry.modules import ModuleNames
from tarry.native import C
from tarry.notebook import Text
from tarry.replay.function import OnDeviation, StepFunction, is_inside
from tarry.replay.verification import Verify
from tarry.runtime.data import read_stand_in, share_stand_in
from tarry.runtime.logged import Logged
from tarry.runtime.runtime import Runtime
from tarry.tracebacks import leave

if TYPE_CHECKING:
    from tarry.ir.graph import Graph
    from tarry.reports.session import Report

P = ParamSpec("P")
T = TypeVar("T")
_runtime = Runtime()
_log = logging.getLogger("tarry")
_report: Report | None = None
event_log = EventLog()


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


def is_installed(backend: str) -> bool:
    """Whether a backend is known and all that it needs can be imported."""
    try:
        registry.find(backend)()
    except Exception:  # whatever it stumbles over, it does not work here
        return False
    return True


@contextmanager
def using_backend(backend: str, device: str) -> Iterator[None]:
    """Within the block, this backend compiles all graphs. Programs that were compiled before are forgotten."""
    before, policy = _runtime.backend, _runtime.policy
    set_backend(backend, device, compile="wait")
    try:
        yield
    finally:
        set_backend(before, compile=policy)


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


def add_step_closure(function: Callable[..., Any], *tensors: torch.Tensor, run_async: bool = False) -> None:
    """Call `function` with host copies of `tensors` once the step that computes them is done.

    It has run before `tarry.mark_step()` returns (or `optimizer.step()`, or whatever ends the step), and what it raises
    is raised there. With `run_async`, a thread of its own runs it, and the step is not held up:
    `tarry.add_step_closure(lambda loss: print(loss.item()), loss, run_async=True)` logs a loss without a wait. What it
    raises then is raised by the end of a later step, or by `tarry.wait()`. If the step fails, `function` is called if
    all of `tensors` could be computed, and not at all otherwise.
    """
    _runtime.add_step_closure(function, tensors, run_async)


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
        return Text(_runtime.compiled_text(list(tensors)))
    return Text(to_text(graph(*tensors, stage=stage)))


def report(path: str | os.PathLike[str] | None = None) -> Report:
    """Record what tarry does from here on, and make a page of it: `tarry.report("out.html")` at the start of a program.

    Events are written to a file beside the page as they happen (`out.json`; docs/report.md), the page at the end of the
    process, of a `with` block, or when `close()` or `write()` is called. Without a path: the recording that is under
    way, or else one in a temporary folder; a notebook shows its page.
    """
    from tarry.reports.session import Report

    global _report
    if path is None and _report is not None:
        return _report
    if _report is not None and _report.active:
        if not isinstance(path, str | os.PathLike) or not _report.is_at(path):
            raise ValueError(f"tarry.report: a report is being recorded already, in {_report.path}; close() it first")
        return _report
    chosen = Path(tempfile.mkdtemp(prefix="tarry-report-")) / "report.html" if path is None else path
    versions = {"tarry": importlib.metadata.version("tarry"), "torch": str(torch.__version__)}
    _report = Report(chosen, versions, metrics.counters, _runtime.describe_backend, _runtime.observe_compiles)
    return _report


def _on_config(name: str, value: Any) -> None:
    if name in ("compile", "direct_calls"):
        _runtime.on_policy()
        return
    if name == "fallback":
        C.set_watched("fallback", value == "error")
        return
    if name == "save_graphs":
        C.set_watched("writer", value is not None)
        return
    if name == "log":
        event_log.choose(value)
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

    def is_observed(self) -> bool:
        return is_inside() or torch.compiler.is_compiling()


@_boundary
def _synchronize() -> None:
    if not distributed.of_other_threads():
        _runtime.sync_all("synchronize")
    _runtime.wait()


def _at_exit() -> None:
    """Let the autograd engine's thread drop what it still holds of the last backward pass.

    It needs the GIL for that; one that asks for the GIL once the interpreter is shutting down is killed in the middle
    of a destructor, and takes the process with it. Sleeping hands the GIL over.
    """
    if device.module.is_initialized():
        time.sleep(0.01)
    events.flush()
    if not C.is_used() and _is_program():
        _log.warning("tarry: nothing was recorded: no tensor was put on device 'tarry'. See docs/run.md: tarry run")
    try:
        _boundary(_runtime.close)()
    finally:
        if _report is not None and not C.in_bad_fork():
            _report.close()


def _user_line() -> str:
    place = places.here()
    return f"{place['file']}:{place['line']}"


def _is_program() -> bool:
    """Whether this process is one that a user has started, and not a command of tarry's or a worker."""
    main = sys.modules.get("__main__")
    ours = sys.modules["tarry"]
    if _was_autoloaded() and not any(value is ours for value in getattr(main, "__dict__", {}).values()):
        return False  # it has only imported torch
    spec = getattr(main, "__spec__", None)
    is_ours = spec is not None and spec.name.partition(".")[0] in ("tarry", "benchmarks", "pytest")
    is_ours = is_ours or "tarry.cli" in sys.modules  # which says more
    return not (is_ours or multiprocessing.parent_process() or C.in_bad_fork() or sys.flags.interactive)


def _was_autoloaded() -> bool:
    """Whether `import torch` has imported tarry (tarry_autoload.py)."""
    return getattr(sys.modules.get("tarry_autoload"), "is_loaded", False)


def _on_torch_compile(where: Frame | None, operations: int) -> None:
    place = {"file": where.file, "line": where.line} if where else {}
    events.emit("torch_compile", operations=operations, **place)


def _install() -> None:
    C.set_file_judge(places.judge)
    C.set_module_namer(torch.nn.Module, ModuleNames().name)
    callbacks = (
        _runtime.on_sync,
        _runtime.on_batch,
        _runtime.on_failure,
        _runtime.on_program_failure,
        _runtime.on_fallback,
        read_stand_in,
        share_stand_in,
        _runtime.on_value,
        events.flush,
        lambda index: _synchronize(),
        _runtime.memory_info,
    )
    C.set_callbacks(*callbacks)
    events.attach(Logged())
    events.count_with(event_log.count)
    for entry in load_table(config.cache_dir):
        if entry.kind in (Kind.RECORD, Kind.KERNEL, Kind.OPAQUE):
            C.register_operator(entry.name, entry.flags, entry.kind is not Kind.RECORD)
        elif entry.kind is Kind.UNSUPPORTED:
            C.refuse_operator(entry.name)
    C.register_layouts()
    C.register_lstm_layers()
    device.install(lambda: config.portable_checkpoints)
    distributed.install(_synchronize, C.reduction, _user_line, C.leave_outstanding, C.recorded_work)
    hooks = StepHooks(_Steps())
    hooks.guard_grad_scaler()
    hooks.speed_up()
    _runtime.after_finish = hooks.settle
    device.module.attach(_synchronize, _runtime.seed)
    metrics.attach(_runtime.backend_metrics)
    config.subscribe(_on_config)
    if _was_autoloaded():
        device.module.at_first_use(config.reread)  # the program may set variables between the two imports
    integrations.install()
    leave_alone(*callbacks, hooks.begin, hooks.end, mark_step, sync, wait)
    Recorded(places.is_users, _on_torch_compile).install(after_import)
    atexit.register(_at_exit)


_install()
