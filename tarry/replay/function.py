"""What `tarry.compile` makes of a function."""

from __future__ import annotations

import copy
import functools
import logging
import threading
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch.autograd import forward_ad

from tarry import events, places
from tarry.errors import ReplayError
from tarry.native import C
from tarry.pytree import TreeSpec, tree_flatten, tree_unflatten
from tarry.replay.capture import Capture, CountedOnHostError
from tarry.replay.checks import PLAIN
from tarry.replay.comparison import Deviation
from tarry.replay.counts import count_on_device
from tarry.replay.guards import Guards, default_devices
from tarry.replay.rates import RateWatch, Schedule, schedule
from tarry.replay.reasons import DisturbedError, NotReplayableError
from tarry.replay.verification import Verification, Verify
from tarry.replay.watch import Watch
from tarry.runtime.runtime import Runtime

log = logging.getLogger("tarry")

P = ParamSpec("P")
T = TypeVar("T")
OnDeviation: TypeAlias = Literal["raise", "warn"]
MAX_PLANS = 8
"""Of one function: for other shapes, training and evaluation, ... The least recently used goes first."""
MAX_FRUITLESS = 4
"""After that many calls in a row that showed nothing, calls are watched more and more rarely: watching costs time."""
LONGEST_PAUSE = 128
_NOT_CALLED = "it has not been called"

_thread = threading.local()
_watching = threading.Lock()
_watches: list[Watch] = []  # the one that is going on, if there is one


def is_inside() -> bool:
    """Whether this thread is in a call of a compiled function: the step ends where the function ends, not before."""
    return getattr(_thread, "depth", 0) > 0


def _is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is going on: what its tensors carry along is
    not for a replay to see. Private names; checked on torch 2.11 and 2.13."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


class _Arguments:
    """The arguments of a call, and what they were like before it."""

    def __init__(self, tree: TreeSpec | int, leaves: list[Any]) -> None:
        self.leaves = leaves
        self._tree = tree
        self._views = list(map(_view, leaves))

    def are_like(self, tree: TreeSpec | int, leaves: list[Any]) -> bool:
        return bool(tree == self._tree and self._guard.failing(leaves) == -1)

    def note(self) -> None:
        """Note what they are like, for `are_like`."""
        self._guard = C.ArgumentGuard(self.leaves)

    def check_unchanged(self, tree: TreeSpec | int, leaves: list[Any]) -> None:
        """Raise NotReplayableError if the call has changed them, but for what is in the tensors."""
        if tree != self._tree or any(a is not b for a, b in zip(leaves, self.leaves, strict=True)):
            raise NotReplayableError("it changes a list or a dict that is an argument. Return what it adds")
        for k, (leaf, before) in enumerate(zip(leaves, self._views, strict=True)):
            if _view(leaf) != before:
                raise NotReplayableError(f"it changes the shape, the strides or requires_grad of argument {k}")

    def without_tensors(self) -> _Arguments:
        """Let go of the tensors. All else has to stay: the guard only looks at it."""
        self.text = ", ".join(map(_describe, self.leaves))
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return self


@dataclass
class _Call:
    """A call that is to be recorded."""

    run: Callable[[], Any]
    flatten: Callable[[], tuple[TreeSpec | int, list[Any]]]
    arguments: _Arguments
    number: int
    alike: list[ReplayPlan]  # plans for such arguments


@dataclass(eq=False)
class ReplayPlan:
    """A call that was recorded, and what must be the same for it to be replayed."""

    arguments: _Arguments
    guards: Guards
    capture: Capture
    rates: RateWatch
    generation: int
    verification: Verification
    confirmations: int = 1
    schedule: Schedule | None = None
    replay: Any = None  # once enough calls have confirmed it

    def failing(self) -> int:
        """The first guard that fails, -1 if all hold."""
        return self.guards.failing(with_rates=self.schedule is None)

    def numbers(self) -> list[float] | None:
        """Those that follow from the learning rates of now; None if they are unknown."""
        return [] if self.schedule is None else self.schedule.evaluate()

    def deviation(self, capture: Capture, numbers: list[float]) -> Deviation | None:
        """What a call did otherwise than a replay with these numbers would have done."""
        if self.schedule is None:
            return capture.difference(self.capture)
        snapshot, positions = self.capture.snapshot, self.schedule.positions
        recorded = snapshot.numbers()
        snapshot.set_numbers(positions, numbers)
        try:
            return capture.difference(self.capture)
        finally:
            snapshot.set_numbers(positions, [recorded[k] for k in positions])  # those that go with self.rates

    def follow(self, other: ReplayPlan) -> Schedule | None:
        """How the numbers of this call follow from learning rates, if it did the same as another one but for them."""
        if self.capture.difference(other.capture, numbers=False) is not None:
            return None
        return schedule(other.rates, other.capture.snapshot.numbers(), self.rates, self.capture.snapshot.numbers())

    def results(self, made: list[torch.Tensor], leaves: list[Any]) -> Any:
        """What the function would return."""
        capture = self.capture
        found = []
        for result in capture.results:
            match result.kind:
                case "made":
                    found.append(made[result.value])
                case "argument":
                    found.append(leaves[result.value])
                case _:
                    found.append(result.value)
        return found[0] if capture.result_tree.is_leaf() else tree_unflatten(found, capture.result_tree)


def _view(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return None
    return leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.requires_grad


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__name__
    host = "" if leaf.device.type == "tarry" else f" on {leaf.device}"
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{host}"


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TreeSpec | int, list[Any]]:
    """The leaves of the arguments and what they are part of; the number of arguments, where each is a leaf itself."""
    if not kwargs and all(isinstance(arg, torch.Tensor | bool | int | float | str | None) for arg in args):
        return len(args), list(args)
    leaves, tree = tree_flatten((args, kwargs))
    return tree, leaves


class StepFunction(Generic[P, T]):
    """A function whose calls are replayed while they do the same, and verified now and then: see `tarry.compile`."""

    def __init__(
        self,
        runtime: Runtime,
        function: Callable[P, T],
        warm_up: int = 2,
        verify: Verify = None,
        on_deviation: OnDeviation = "raise",
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._runtime = runtime
        self._warm_up = warm_up
        self._verify: Verify = verify
        self._on_deviation: OnDeviation = on_deviation
        self._lock = threading.RLock()
        self._plans: list[ReplayPlan] = []  # the most recently used first
        self._attribute = ""  # the name under which a class has it
        self._fruitless = 0  # calls in a row that were watched and showed nothing
        self._pause = 0  # calls that are not watched
        self._counted: tuple[Guards, Capture] | None = None  # of the last call, if it failed for a count alone
        self._reason = _NOT_CALLED
        self._deviation = ""  # the last one
        self._is_given_up = False  # after a deviation with on_deviation="warn"
        self.recorded = 0
        """Calls that ran the function's Python."""
        self.replays = 0
        """Calls that did not."""
        self.verified = 0
        """Recorded calls that were compared with what a replay would have done."""

    # ---- as a method, copied, pickled

    def _for(self, function: Callable[..., Any]) -> StepFunction[Any, Any]:
        made = StepFunction[Any, Any](self._runtime, function, self._warm_up, self._verify, self._on_deviation)
        made._attribute = self._attribute
        return made

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A step function of its own for each instance, which has it from the first use on."""
        if instance is None:
            return self
        if not hasattr(instance, "__dict__"):
            raise TypeError(
                f"tarry.compile: {type(instance).__name__} has __slots__ and no __dict__ to keep its replays in. Write "
                f"self.{self._attribute} = tarry.compile(...) in its __init__, with a slot for it"
            )
        own = self._for(self._function.__get__(instance, owner))
        return instance.__dict__.setdefault(self._attribute, own)  # found before this descriptor from now on

    def __deepcopy__(self, memo: dict[int, Any]) -> StepFunction[P, T]:
        """A copy of a model has plans of its own."""
        return self._for(copy.deepcopy(self._function, memo))

    def __reduce__(self) -> Any:
        """A method is found again through its object, a function through its name."""
        if self._attribute and isinstance(self._function, types.MethodType):
            return getattr, (self._function.__self__, self._attribute)
        return self._name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if is_inside() or _is_transformed():
            return self._function(*args, **kwargs)
        tree, leaves = _flatten(args, kwargs)
        with self._lock:
            number = self.recorded + self.replays + 1
            alike = [plan for plan in self._plans if plan.arguments.are_like(tree, leaves)]
            plan = self._find(alike, leaves)
            if plan is not None and plan.replay is not None and not plan.verification.is_due():
                made = self._replay(plan, leaves, number)
                if made is not None:
                    result: T = plan.results(made, leaves)
                    return result
                plan = None
            self.recorded += 1
        call = _Call(
            lambda: self._function(*args, **kwargs),
            lambda: _flatten(args, kwargs),
            _Arguments(tree, leaves),
            number,
            alike,
        )
        return self._record(plan, call)

    # ---- replaying

    def _find(self, alike: list[ReplayPlan], leaves: list[Any]) -> ReplayPlan | None:
        """The plan whose guards hold, among those for such arguments. Notes what is different if there is none."""
        failed = unconfirmed = ""
        for plan in alike:
            check = plan.failing()
            if check == -1 and plan.generation == self._runtime.generation:
                if plan is not self._plans[0]:
                    self._plans.remove(plan)
                    self._plans.insert(0, plan)
                    plan.verification.note_switch()
                return plan
            difference = "the backend was changed" if check == -1 else plan.guards.explain_failing(check)
            if plan.replay is None:
                unconfirmed = unconfirmed or difference
            else:
                failed = failed or difference
        if not failed and any(plan.replay is not None for plan in self._plans):
            failed = f"no call with such arguments was replayed before: {', '.join(map(_describe, leaves))}"
        if failed:
            self._guard_failed(failed)
        elif unconfirmed:
            self._reason = unconfirmed
        return None

    def _guard_failed(self, reason: str) -> None:
        self._reason = reason
        events.emit("replay_guard_failed", function=self._name, reason=reason, **places.of_caller())

    def _replay(self, plan: ReplayPlan, leaves: list[Any], number: int) -> list[torch.Tensor] | None:
        numbers = plan.numbers()
        if numbers is None:
            assert plan.schedule is not None
            self._guard_failed(plan.schedule.explain())
            return None
        _disturb()
        self._runtime.sync_all("before a replay")  # what fails there has nothing to do with this call
        try:
            made = self._runtime.replay(plan.replay, leaves, numbers)
        except BaseException:
            self._renew(plan)  # its nodes are part of what has failed
            raise
        if isinstance(made, str):
            self._forget(plan)
            self._guard_failed(made)
            return None
        self.replays += 1
        self._fruitless = 0
        plan.verification.note_replay(number)
        events.emit("replay", function=self._name, **places.of_caller())
        return made

    def _renew(self, plan: ReplayPlan) -> None:
        plan.replay = plan.capture.replay(plan.schedule.positions if plan.schedule else ())
        self._hasten()

    def _hasten(self) -> None:
        """Have the next call of every plan verified: something unusual has happened."""
        for plan in self._plans:
            plan.verification.hasten()

    # ---- recording

    def _record(self, plan: ReplayPlan | None, call: _Call) -> Any:
        if self._reason == _NOT_CALLED:
            self._reason = ""
        is_verified = plan is not None and plan.replay is not None
        is_watched = (is_verified or self._pause == 0) and not self._is_given_up and default_devices() is not None
        if not is_watched or not _watching.acquire(blocking=False):
            self._pause = max(self._pause - 1, 0)
            _disturb()
            return self._call_only(call)
        try:
            self._runtime.sync_all("before a compiled function")
            if plan is None or plan.replay is None:
                return self._watch(plan, call)
            numbers = plan.numbers()
            if numbers is None:  # it could not have been replayed
                return self._watch(None, call)
            if plan.replay.refusal(call.arguments.leaves) is not None:  # nor then
                self._forget(plan)
                return self._watch(None, call)
            return self._verify_call(plan, call, numbers)
        finally:
            _watching.release()

    def _call_only(self, call: _Call) -> Any:
        with _Inside():
            result = call.run()
        self._runtime.sync_all("end of a compiled function")
        return result

    def _run(self, watch: Watch, call: _Call) -> Any:
        _watches.append(watch)
        try:
            with _Inside():
                return watch.run(call.run)
        except BaseException:
            self._hasten()
            raise
        finally:
            _watches.remove(watch)

    def _watch(self, plan: ReplayPlan | None, call: _Call) -> Any:
        """Record a call, and learn from it."""
        try:
            guards = Guards(self._function, call.arguments.leaves)
        except NotReplayableError as reason:
            self._nothing_learned(str(reason))
            return self._call_only(call)
        except Exception as error:  # objects of the user's may do anything when they are looked at
            self._nothing_learned(f"its surroundings cannot be looked at: {type(error).__name__}: {error}")
            return self._call_only(call)
        generation = self._runtime.generation
        steady = [p for p in call.alike if p.generation == generation and p.guards.failing(with_rates=False) == -1]
        counted = self._counted
        if counted is not None and counted[0].failing(with_counts=False, with_rates=False) != -1:
            counted = None
        call.arguments.note()
        watch = Watch(self._runtime, guards, call.arguments.leaves, guards.rates)
        result = self._run(watch, call)
        with self._lock:
            try:
                call.arguments.check_unchanged(*call.flatten())
                capture = watch.judge(result)
            except CountedOnHostError as reason:
                self._nothing_learned(str(reason))
                if counted is not None and reason.capture.difference(counted[1], numbers=False) is None:
                    self._count_on_device(reason.optimizers)
                else:
                    self._counted = guards, reason.capture
            except NotReplayableError as reason:
                self._forget(plan)
                self._counted = None
                self._nothing_learned(str(reason))
            else:
                verification = Verification(self._verify, call.number)
                found = ReplayPlan(
                    call.arguments.without_tensors(), guards, capture, watch.rates, generation, verification
                )
                self._learn(plan, found, call.alike, steady)
        return result

    def _count_on_device(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Counting is all that stands in the way, in two calls that did the same. A function that is recorded anyway,
        for something else that changes at every call, does not get here, and stays as it is."""
        self._counted = None
        count_on_device(optimizers)
        names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
        self._reason = f"{names} counted its steps on the host; from now on it does so on the device (capturable=True)"
        log.info("%s: %s", self._name, self._reason)

    def _learn(
        self, before: ReplayPlan | None, found: ReplayPlan, alike: list[ReplayPlan], steady: list[ReplayPlan]
    ) -> None:
        """A call could be replayed. It will be, if as many before it did the same. `before` is a plan whose guards
        held, not confirmed yet; `steady` are plans whose guards held but for learning rates."""
        if before is not None and before.rates.values == found.rates.values:
            difference = found.capture.difference(before.capture)
            if difference is None:
                found.confirmations = before.confirmations + 1
                found.schedule = before.schedule
            else:
                self._nothing_learned(difference.text)
            self._forget(before)
        elif (followed := self._follow(found, steady)) is not None:
            found.confirmations = followed.confirmations + 1
            self._forget(followed)
        elif alike and (len(alike) >= MAX_PLANS or not any(map(self._may_come_back, alike))):
            self._nothing_learned(self._reason)  # something is different at every call
        if found.confirmations >= self._warm_up:
            self._fruitless = 0
            found.replay = found.capture.replay(found.schedule.positions if found.schedule else ())
        self._plans = [found, *filter(self._may_come_back, self._plans)][:MAX_PLANS]

    def _follow(self, found: ReplayPlan, steady: list[ReplayPlan]) -> ReplayPlan | None:
        """A plan that a call differs from by learning rates alone, so that it shows what follows from them."""
        for plan in steady:
            if (found_schedule := found.follow(plan)) is not None:
                found.schedule = found_schedule
                return plan
        return None

    def _may_come_back(self, plan: ReplayPlan) -> bool:
        """Whether the guards of a plan can hold again: a replaced parameter is not waited for."""
        check = plan.failing()
        return plan.generation == self._runtime.generation and (check == -1 or plan.guards.is_value(check))

    def _forget(self, plan: ReplayPlan | None) -> None:
        if plan is not None and plan in self._plans:
            self._plans.remove(plan)

    def _nothing_learned(self, reason: str) -> None:
        self._reason = reason
        events.emit("replay_refused", function=self._name, reason=reason, **places.of_caller())
        self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS:
            self._pause = min(2 ** (self._fruitless - MAX_FRUITLESS), LONGEST_PAUSE)

    # ---- verifying

    def _verify_call(self, plan: ReplayPlan, call: _Call, numbers: list[float]) -> Any:
        """Record a call that could have been replayed, with these numbers, and compare. What it returns and does is the
        recorded call's."""
        watch = Watch(self._runtime, plan.guards, call.arguments.leaves, plan=plan.capture)
        try:
            result = self._run(watch, call)
        except Exception as error:
            if plan.verification.replayed:
                error.add_note(f"tarry.compile: {plan.verification.replayed_since()}. They may have had to raise, too")
            raise
        with self._lock:
            try:
                call.arguments.check_unchanged(*call.flatten())
                capture = watch.judge(result)
            except DisturbedError:  # it shows nothing: the next call is verified instead
                return result
            except NotReplayableError as reason:
                deviation: Deviation | None = Deviation(str(reason))
            else:
                deviation = plan.deviation(capture, numbers)
            if deviation is None:
                self.verified += 1
                plan.verification.note_verified(call.number)
                events.emit("replay_verified", function=self._name, **places.of_caller())
            else:
                self._deviated(plan, deviation, call.number)
        return result

    def _deviated(self, plan: ReplayPlan, deviation: Deviation, number: int) -> None:
        """A call did otherwise than its replay would have done. Those that were replayed may be wrong."""
        since = plan.verification
        self._forget(plan)
        self._hasten()
        self._deviation = self._reason = f"call {number} did otherwise than a replay of it: {deviation.text}"
        events.emit("replay_deviation", function=self._name, reason=deviation.text, **places.of_caller())
        log.log(logging.WARNING if self._verify == 1 else logging.INFO, "%s: %s", self._name, self._deviation)
        if not since.replayed:
            return  # every call so far was right
        error = ReplayError(
            f"{self._name}: {self._deviation}. Nothing that tarry.compile guards has changed, so "
            f"{since.replayed_since()}, perhaps with wrong results. Call {number} itself was recorded and is right. "
            f"Make what the function depends on an argument, a tensor or a plain attribute of an object that it names; "
            f"see docs/replay.md",
            function=self._name,
            operator=deviation.operator,
            where=deviation.where,
            before=deviation.before,
            now=deviation.now,
            call=number,
            replayed=tuple(since.replayed),
            last_verified=since.last,
        )
        if self._on_deviation == "raise":
            raise error
        self._is_given_up = True
        self._plans.clear()
        warnings.warn(f"tarry.compile: {error} From now on, every call is recorded.", stacklevel=5)

    # ---- explaining

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__qualname__", type(self._function).__name__))

    def explain(self) -> str:
        """Whether calls are replayed, and why not, as text."""
        with self._lock:
            ready = [plan for plan in self._plans if plan.replay is not None]
            lines = [f"{self._name}: {self.recorded} calls recorded, {self.replays} replayed, {self.verified} verified"]
            for plan in ready:
                operations = plan.capture.snapshot.batch.num_operations
                lines.append(
                    f"  replayed for ({plan.arguments.text}): {operations} operators, {len(plan.guards)} guards"
                )
                lines.append(f"    {plan.verification.replayed_since()}")
            if not ready and self._plans:
                lines.append("  not replayed yet: calls have to do the same a few times in a row first")
            if self._reason:
                lines.append(f"  {'why a call was recorded, lately: ' if ready else ''}{self._reason}")
            if self._deviation and self._deviation != self._reason:
                lines.append(f"  {self._deviation}")
            if self._is_given_up:
                lines.append("  every call is recorded since then")
            elif self._pause:
                lines.append(f"  the next {self._pause} calls are recorded without looking at whether they repeat")
            return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<tarry.compile of {self._name}: {self.recorded} calls recorded, {self.replays} replayed>"


def _disturb() -> None:
    """A call that another thread watches meanwhile shows nothing: this one's operators may be among its own."""
    for watch in _watches:
        watch.disturbed = True


class _Inside:
    """Within the block, this thread is in a compiled function."""

    def __enter__(self) -> None:
        _thread.depth = getattr(_thread, "depth", 0) + 1

    def __exit__(self, *exc_info: object) -> None:
        _thread.depth -= 1
