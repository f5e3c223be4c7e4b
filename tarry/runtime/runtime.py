"""The runtime: from a request for values to values.

A request (an `.item()`, a copy to the host, `optimizer.step()`, `mark_step()`, a limit) computes *everything* that
is pending, in one batch, so that ten `.item()` calls in a row run one program. Requests of several threads are served
one at a time; recording goes on meanwhile.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

import torch

from tarry import events, places
from tarry.backends import registry
from tarry.backends.base import Backend, Batch, Policy, Recording
from tarry.config import COMPILE_POLICIES, config
from tarry.errors import BackendError, FallbackError, TarryError
from tarry.ir.raw import RawGraph
from tarry.native import C
from tarry.runtime import limits
from tarry.runtime.choose import default_name, instance, is_importing_torch
from tarry.runtime.closures import StepClosures
from tarry.runtime.compile.compiler import Compiler
from tarry.runtime.compile.observe import Observer
from tarry.runtime.data import evacuate
from tarry.runtime.decide import small_step
from tarry.runtime.dispatch import PlainDispatch, profiled, refuse_while_compiling
from tarry.runtime.engine import Engine
from tarry.runtime.graphs import SavedGraphs
from tarry.runtime.logged import budget_cut
from tarry.tracebacks import leave

_log = logging.getLogger("tarry")


class Runtime:
    """The state of the runtime: the backend, its compiled programs, and the closures that wait for a step's end."""

    def __init__(self) -> None:
        self._lock = C.step_lock()
        self._compiler = Compiler()
        self._engines: list[Engine] = []
        """One for each device that was used."""
        self._closures = StepClosures()
        self._saved = SavedGraphs()
        self._backend: Backend | None = None
        self._devices: Sequence[Backend] = ()
        """Those of the backend: each computes what is pending on one device."""
        self._choosing = threading.local()
        self.generation = 0
        """Grows when all programs are forgotten: what was prepared for the old backend is void then."""
        self._observer: Callable[[C.Batch], None] | None = None
        self.after_finish: Callable[[], None] = lambda: None
        """Called when a step is computed, or has failed, before its error is raised."""
        self.closures_added = 0

    # ---- the backend

    @property
    def backend(self) -> Backend:
        """The current backend; that of TARRY_BACKEND, or the best that works here, on first use."""
        return self._backend or self._choose()

    def _choose(self) -> Backend:
        """Choose on first use. Without the lock: importing a compiler takes Python's import locks, and another thread
        that holds one of those may run a finaliser that needs a value. A finaliser that runs in the middle of that very
        import must not conclude that the compiler does not work: the reference path serves it."""
        if getattr(self._choosing, "now", False) or is_importing_torch():
            return registry.find("eager")()
        self._choosing.now = True
        try:
            device = os.environ.get("TARRY_DEVICE")
            name = os.environ.get("TARRY_BACKEND") or default_name(device)
            chosen = instance(name, device)
            with self._lock:
                if self._backend is None:
                    self.set_backend(chosen, device)
                assert self._backend is not None
                return self._backend
        finally:
            self._choosing.now = False

    def set_backend(
        self,
        backend: str | Backend | Callable[..., Any] | None,
        device: str | None = None,
        compile_: Policy | None = None,
    ) -> None:
        """Change the backend. What is pending is computed by the old one first; live tensors move to the new device."""
        refuse_while_compiling()
        if compile_ is not None and compile_ not in COMPILE_POLICIES:
            raise ValueError(f'tarry.set_backend: compile is None, "wait", "background" or "never", not {compile_!r}')
        chosen = instance(default_name(device) if backend is None else backend, device)
        with self._alone():
            old = self._backend
            if old is not None:
                self._finish_all()  # the error of a step that was handed over is raised: nothing has changed yet
                try:
                    self.sync_all("set_backend")
                except TarryError as error:  # the new backend computes what the old one could not
                    events.emit("error", stage="set_backend", backend=old.name, error=repr(error), **places.of_caller())
                self._compiler.forget()
                self._retire(old)
            for engine in self._engines:
                engine.clear()
            self.generation += 1
            C.forget_speculations()
            try:
                self._start(chosen, device if chosen is backend else None, old)
            except BaseException:
                self._backend = None
                if old is not None and old is not chosen:
                    self._start(old, None, None)  # its data were moved out: it begins anew
                raise
            self._compiler.chosen = compile_
            self.on_policy()
            if chosen.is_asynchronous and self._compiler.policy(chosen) == "background":
                self._compiler.warm_up(chosen)

    def _start(self, backend: Backend, device: str | None, before: Backend | None) -> None:
        was_on = backend.device
        try:
            if device is not None:
                backend.device = device
            with PlainDispatch():
                backend.setup()
            self._bind_devices(backend, before)
        except BaseException:
            backend.device = was_on
            raise
        self._backend = backend
        if torch.device(backend.device).type == "cpu" and config.kept_memory and not _malloc_is_set():
            C.keep_freed_memory(config.kept_memory)

    def _retire(self, backend: Backend) -> None:
        """Tear a backend down. A failure is reported, and does not keep the next backend from being set up."""
        evacuate(self._devices)
        try:
            with PlainDispatch():
                backend.teardown()
        except Exception as error:
            events.emit("error", stage="teardown", backend=backend.name, error=repr(error), **places.of_caller())
            warnings.warn(f"tarry: teardown of backend {backend.name!r} failed: {error}", stacklevel=2)

    def _bind_devices(self, backend: Backend, before: Backend | None) -> None:
        """Make the backend's devices the real devices of tarry:0, tarry:1, ..."""
        devices = tuple(backend.devices())
        if len(devices) != C.device_count() and not C.is_used():
            C.set_device_count(len(devices))
        if not 0 <= backend.default_ordinal < C.device_count():
            raise BackendError(
                f"backend {backend.name!r}: default_ordinal is {backend.default_ordinal}, but there are "
                f"{C.device_count()} devices 'tarry:0', ..."
            )
        for index in range(C.device_count()):
            one = _real_device_of(devices, index)
            C.set_real_device(index, one.device, one.capabilities.opaque_data, one.is_asynchronous)
        self._devices = devices
        if backend.default_ordinal != (before.default_ordinal if before is not None else 0):
            C.set_device(backend.default_ordinal)

    def seed(self, value: int) -> None:
        """`torch.manual_seed` was called; a backend that is not chosen yet has nothing to seed."""
        if self._backend is not None:
            self._backend.seed(value)

    def describe_backend(self) -> dict[str, str]:
        """The backend in use, and its real device; empty if none was needed yet."""
        backend = self._backend
        return {"backend": "", "device": ""} if backend is None else {"backend": backend.name, "device": backend.device}

    def backend_metrics(self) -> dict[str, float]:
        """The counts that the backend keeps, under its name."""
        backend = self._backend
        return {} if backend is None else {f"{backend.name}/{key}": n for key, n in backend.metrics().items()}

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        """Free and total bytes of the real device of tarry:ordinal."""
        info = self._one_of(self.backend, ordinal).memory_info()
        return info.free, info.total

    def _one_of(self, backend: Backend, device: int) -> Backend:
        """Of a backend's devices, the one that computes what is pending on tarry:device."""
        return _real_device_of(self._devices if backend is self._backend else backend.devices(), device)

    def _engine_of(self, device: int) -> Engine:
        while len(self._engines) <= device:
            self._engines.append(Engine(self._compiler))
        return self._engines[device]

    def close(self) -> None:
        """The process ends: closures finish, what is pending or being compiled is dropped, the backend torn down."""
        self._closures.finish()
        self._compiler.close()
        try:
            self._finish_last()
            for text in C.owed_errors():
                _log.error("tarry: a step failed, and no thread has asked for its values since: %s", text)
        finally:
            C.stop_executors()
            if self._backend is not None:
                self._backend.teardown()

    def _finish_last(self) -> None:
        """Report the failure of a last step. Another thread may have been stopped in the middle of a step: wait no
        longer than `EXIT_SECONDS` for it."""
        if not C.in_bad_fork() and self._lock.acquire(timeout=limits.EXIT_SECONDS):
            try:
                self._finish_all()
            finally:
                self._lock.release()

    @property
    def policy(self) -> Policy | None:
        """The policy that `set_backend` was given."""
        return self._compiler.chosen

    def on_policy(self) -> None:
        """The policy may have changed: set which steps the native part serves by itself."""
        if self._backend is None:
            return
        with self._lock:
            for engine in self._engines:
                engine.forget_served()
            steps = [small_step(one, self._compiler.policy(one)) for one in self._devices]
            C.set_small_step(*(min(least) for least in zip(*steps, strict=True)))
            C.set_direct_calls(limits.DIRECT_AFTER if config.direct_calls else 0, limits.DIRECT_UNTIL)

    # ---- syncing

    def observe(self, observer: Callable[[C.Batch], None] | None) -> None:
        """Have `observer` called with each batch before it runs."""
        self._observer = observer
        C.set_watched("observer", observer is not None)

    def observe_compiles(self, observer: Observer | None) -> None:
        """Have `observer` called with each graph that gets a program (compile/observe.py)."""
        self._compiler.observer = observer

    def sync_all(self, reason: str, *, awaited: bool = True) -> None:
        """Compute everything that is pending on any device."""
        for device in range(C.device_count()):
            self.sync(reason, device, awaited=awaited)

    def sync(self, reason: str, device: int = 0, *, awaited: bool = True) -> None:
        """Compute everything that is pending on a device; if that is not awaited, perhaps while this thread goes on."""
        if C.serve(device, reason, awaited):
            return
        refuse_while_compiling()
        backend = self.backend  # before the lock: see _choose
        try:
            with self._lock:  # as _alone(), without what a context manager in Python costs
                if self._lock.in_step:
                    raise _in_mid_step()
                if awaited or not C.is_in_flight(device):
                    asked = perf_counter()
                    self._finish(device)
                    waited = perf_counter() - asked
                    batch = C.collect(device)
                    if batch is not None:
                        if self._observer is not None:
                            self._observer(batch)
                        if config.save_graphs is not None:
                            self._saved.save(batch, reason, config.save_graphs)
                        batch.unawaited = not awaited
                        self._compute(self._backend or backend, batch, reason, asked, waited)
            C.raise_owed()
        except Exception:
            if not C.pending(device):  # the step is done, but for what has failed
                self._closures.run(failed=True)
            raise
        self._closures.run()

    def _finish(self, device: int) -> None:
        """Wait for the step in flight. If it failed, it is computed by the reference path, and its error raised here.
        The lock is held."""
        failed = C.finish_step(device)
        if failed is None:
            self.after_finish()
            return
        self.on_program_failure(failed.batch, failed.diagnose, failed.rethrow, failed.close)

    def finish_all(self) -> None:
        """Wait for steps that were handed over, and raise their errors."""
        with self._alone():
            self._finish_all()
        C.raise_owed()

    def _finish_all(self) -> None:
        for device in range(C.device_count()):
            self._finish(device)

    def replay(self, replay: C.Replay, arguments: list[Any], numbers: list[float]) -> list[torch.Tensor] | str:
        """Run a step that was recorded before (`C.Replay`) again, with these numbers for those that it is to be given.
        Gives its results, or why it cannot be run now."""
        refuse_while_compiling()
        with self._lock:
            if self._lock.in_step:
                raise _in_mid_step()
            asked = perf_counter()
            self._finish(replay.batch.device)
            waited = perf_counter() - asked
            if C.pending(replay.batch.device):
                self.sync("before a replay", replay.batch.device)
            C.raise_owed()
            results: list[torch.Tensor] | str = replay.arm(arguments, numbers)
            if isinstance(results, str):
                return results
            if not C.serve_replay(replay.batch, waited):
                replay.batch.unawaited = True
                self._compute(self.backend, replay.batch, "replay", asked, waited)
        self._closures.run()
        return results

    def _compute(self, backend: Backend, batch: C.Batch, reason: str, asked: float, waited: float) -> None:
        """Compute a batch. It was asked for then, and so many seconds were waited since. The lock is held."""
        operations = batch.num_operations  # its nodes are not ours any more when it is handed over
        began, device = asked if batch.replayed else batch.began, batch.device
        backend, engine = self._one_of(backend, device), self._engine_of(device)
        collects = gc.isenabled()
        counted = C.count_memory(batch.device)
        try:  # first: an interrupt may come after any call
            self._lock.in_step = True
            gc.disable()  # a finaliser that needs a value could not be served in the middle of a step
            profiled("tarry::step", engine.compute, backend, batch, reason)
        except BaseException:
            self.after_finish()
            raise
        finally:
            self._lock.in_step = False
            C.count_memory(counted)
            if collects:
                gc.enable()
        seconds, place = perf_counter() - asked, places.of_caller()
        events.emit(
            "sync",
            reason=reason,
            operations=operations,
            path="replayed" if batch.replayed else engine.path,
            start=began,
            record_seconds=asked - began,
            wait_seconds=waited,
            execute_seconds=engine.execute_seconds,
            seconds=seconds,
            device=device,
            **place,
        )
        cut = budget_cut(reason, operations=operations, seconds=seconds, device=device, **place)
        if cut is not None:
            events.emit("budget_cut", **cut)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for a step that another thread runs; a step of this thread's own cannot be waited for."""
        refuse_while_compiling()
        with self._lock:
            if self._lock.in_step:
                raise _in_mid_step()
            yield

    def peek(self, tensors: list[torch.Tensor]) -> RawGraph:
        """The raw graph that would compute some tensors."""
        with self._alone():
            return C.peek(tensors).raw()

    def compiled_text(self, tensors: list[torch.Tensor]) -> str:
        """What the backend makes of the graph that would compute some tensors, as text. Compiles it, runs nothing."""
        with self._alone():
            batch = C.peek(tensors)
            backend = self._one_of(self.backend, batch.device)
            text = self._engine_of(batch.device).text(backend, batch)
        if text is None:
            recorded = Recording(batch).recorded
            return f"backend {backend.name!r} runs this graph as it was recorded:\n{recorded}"
        return text

    def materialise(self, tensors: Iterable[torch.Tensor]) -> None:
        """Compute what is pending if any of these tensors is; all that is pending if none is given."""
        chosen = list(tensors)
        for tensor in chosen:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"tarry.sync takes tensors, not {type(tensor).__name__}")
        if not chosen:
            self.sync_all("sync")
        for tensor in chosen:
            if tensor.device.type == "tarry":
                C.materialise(tensor)

    def wait(self) -> None:
        """Wait for what is in flight, step closures among it."""
        with self._alone():
            self._finish_all()
        for backend in self._devices or self.backend.devices():
            backend.synchronize()
        self._closures.wait()

    def wait_for_compiles(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled in the background; False if that took longer."""
        return self._compiler.wait(timeout)

    def no_recompile(self) -> AbstractContextManager[None]:
        """Within the block, a step that has no program raises."""
        return self._compiler.no_recompile.block()

    # ---- step closures

    def add_step_closure(
        self, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], run_async: bool
    ) -> None:
        """Have `function(*tensors)` called, with host copies, once the step that computes them is done."""
        self._closures.add(function, tensors, run_async)
        self.closures_added += 1

    # ---- callbacks of the native part

    def on_sync(self, device: int, reason: str, awaited: bool) -> None:
        """A value is needed, or enough is pending (called from any thread, with the GIL)."""
        if not awaited and self._is_inside_step():
            return  # what a step or a compiler records itself is not much
        handled = sys.exc_info()[1]
        try:
            self.sync(reason, device, awaited=awaited)
        except Exception as error:
            raise leave(error, handled)  # noqa: B904 - it is the same error

    def on_batch(self, batch: C.Batch, reason: str) -> None:
        """A read needs a batch that the native part has collected and does not compute by itself. The lock is held."""
        handled = sys.exc_info()[1]
        try:
            self._compute(self.backend, batch, reason, batch.asked, batch.waited)
        except Exception as error:
            raise leave(error, handled)  # noqa: B904 - it is the same error

    def on_failure(self, error: str) -> None:
        """A step that the native part has computed by itself has failed; its error is about to be raised."""
        self.after_finish()
        events.emit("error", stage="execute", backend=self.backend.name, error=error, **places.of_caller())

    def on_program_failure(
        self,
        batch: Batch,
        diagnose: Callable[[Batch, Exception], None],
        rethrow: Callable[[], None],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """A program has failed that the native part has run: the reference path computes its batch, and its error is
        raised. The lock is held."""
        self._lock.in_step = True
        try:
            try:
                rethrow()
            except Exception as error:
                diagnose(batch, error)
        except BaseException as error:
            events.emit("error", stage="execute", backend=self.backend.name, error=repr(error), **places.of_caller())
            raise
        finally:
            self._lock.in_step = False
            close()
            self.after_finish()

    def _is_inside_step(self) -> bool:
        """Whether this thread computes or compiles a step; if another does, wait for it."""
        if C.is_compiling():
            return True
        with self._lock:
            return self._lock.in_step

    def on_value(self, method: str, device: int, place: C.Place, seconds: float) -> None:
        """The program has read a value, and events have a subscriber."""
        events.emit("read", method=method, device=device, seconds=seconds, **places.fields(place))

    def on_fallback(self, op: str, reason: str, place: C.Place, seconds: float) -> None:
        """An operator is about to run eagerly (`seconds` is negative then), or has."""
        if seconds >= 0:
            remedy = {"remedy": _REMEDIES[reason]} if reason in _REMEDIES else {}
            events.emit("fallback", op=op, reason=reason, **places.fields(place), **remedy, seconds=seconds)
            return
        file, line, library, module = place
        where = (library or (f"{file}:{line}" if file else "an unknown line")) + (f" in {module}" if module else "")
        if config.fallback == "error":
            raise FallbackError(
                f"{op} has to run eagerly because {reason} (at {where}), and tarry.config.fallback is 'error'. "
                f"Avoid it there, or set tarry.config.fallback = 'allow'."
            )


# Of fallbacks, by the reason that csrc/device/layouts.cpp gives; the kind of event has one for all others.
_REMEDIES = {
    "it has a sparse or nested argument": "only dense tensors are recorded: where memory allows, use sparse=False, "
    ".to_dense() or a padded batch"
}


def _real_device_of(devices: Sequence[Backend], index: int) -> Backend:
    """The real device of tarry:index. If there are more than the backend has, its last serves the rest."""
    return devices[min(index, len(devices) - 1)]


def _in_mid_step() -> TarryError:
    return TarryError(
        "a value or a graph was asked for in the middle of a step, by code that the step itself runs (an event "
        "subscriber, a signal handler, a kernel written in Python). Note what is needed there, and read it when the "
        "step is done."
    )


def _malloc_is_set() -> bool:
    """Whether the user has chosen settings of the C library's allocator."""
    return any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
