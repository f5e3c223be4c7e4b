"""What `tarry.compile` makes of a function."""

from __future__ import annotations

import copy
import functools
import logging
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten  # private; checked on torch 2.11 and 2.13

from tarry import events
from tarry.native import C
from tarry.replay.contents import PLAIN
from tarry.replay.counts import count_on_device
from tarry.replay.environment import Environment, default_devices
from tarry.replay.evidence import Evidence
from tarry.replay.proof import Witness
from tarry.replay.rates import RateWatch, Schedule, schedule
from tarry.replay.reasons import CountedOnHostError, NotReplayableError
from tarry.runtime.sync import Runtime

log = logging.getLogger("tarry")

P = ParamSpec("P")
T = TypeVar("T")
MAX_REPLAYS = 8
"""Of one function: for other shapes, training and evaluation, ... The least recently used goes first."""
PATIENCE = 4
"""After that many calls in a row that proved nothing, calls are watched more and more rarely: watching costs time."""
LONGEST_PAUSE = 128
_NOT_CALLED = "it has not been called"

_thread = threading.local()
_watching = threading.Lock()


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
        self._guard = C.ArgumentGuard(leaves)
        self._views = list(map(_view, leaves))

    def are_like(self, tree: TreeSpec | int, leaves: list[Any]) -> bool:
        return bool(tree == self._tree and self._guard.failing(leaves) == -1)

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


@dataclass(eq=False)
class _Entry:
    """A call that was watched, and what must be the same for it to be replayed."""

    arguments: _Arguments
    environment: Environment
    evidence: Evidence
    rates: RateWatch
    generation: int
    confirmations: int = 1
    schedule: Schedule | None = None
    replay: Any = None
    used: bool = False

    def failing(self) -> int:
        """The first check of its environment that fails, -1 if all hold."""
        return self.environment.failing(with_rates=self.schedule is None)

    def follows(self, other: _Entry) -> Schedule | None:
        """How the numbers of this call follow from learning rates, if it has found all else as another one has."""
        if self.evidence.difference(other.evidence, numbers=False) is not None:
            return None
        return schedule(other.rates, other.evidence.numbers, self.rates, self.evidence.numbers)

    def results(self, made: list[torch.Tensor], leaves: list[Any]) -> Any:
        """What the function would return."""
        evidence = self.evidence
        found = []
        for result in evidence.results:
            match result.kind:
                case "made":
                    found.append(made[result.value])
                case "argument":
                    found.append(leaves[result.value])
                case _:
                    found.append(result.value)
        return found[0] if evidence.result_tree.is_leaf() else tree_unflatten(found, evidence.result_tree)


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
    """A function whose calls are replayed once they have proved stable. Made by `tarry.compile`."""

    def __init__(self, runtime: Runtime, function: Callable[P, T], warm_up: int) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._runtime = runtime
        self._warm_up = warm_up
        self._lock = threading.RLock()
        self._entries: list[_Entry] = []  # the most recently used first
        self._attribute = ""  # the name under which a class has it
        self._fruitless = 0  # calls in a row that were watched and proved nothing
        self._pause = 0  # calls that are not watched
        self._counted: tuple[Environment, Evidence] | None = None  # of the last call, if it failed for a count alone
        self._reason = _NOT_CALLED
        self.recorded = 0
        """Calls that ran the function's Python."""
        self.replays = 0
        """Calls that did not."""

    # ---- as a method, copied, pickled

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A step function of its own for each instance, which has it from the first use on."""
        if instance is None:
            return self
        own = StepFunction[Any, Any](self._runtime, self._function.__get__(instance, owner), self._warm_up)
        own._attribute = self._attribute
        if not hasattr(instance, "__dict__"):
            raise TypeError(
                f"tarry.compile: {type(instance).__name__} has __slots__ and no __dict__ to keep its replays in. Write "
                f"self.{self._attribute} = tarry.compile(...) in its __init__, with a slot for it"
            )
        return instance.__dict__.setdefault(self._attribute, own)  # found before this descriptor from now on

    def __deepcopy__(self, memo: dict[int, Any]) -> StepFunction[P, T]:
        """A copy of a model has to prove itself."""
        copied = StepFunction(self._runtime, copy.deepcopy(self._function, memo), self._warm_up)
        copied._attribute = self._attribute
        return copied

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
            alike = [entry for entry in self._entries if entry.arguments.are_like(tree, leaves)]
            entry = self._find(alike, leaves)
            if entry is not None and entry.replay is not None:
                made = self._replay(entry, leaves)
                if made is not None:
                    result: T = entry.results(made, leaves)
                    return result
        arguments = _Arguments(tree, leaves)
        return self._record(
            entry, alike, arguments, lambda: self._function(*args, **kwargs), lambda: _flatten(args, kwargs)
        )

    # ---- replaying

    def _find(self, alike: list[_Entry], leaves: list[Any]) -> _Entry | None:
        """The entry whose surroundings are as they were, among those with such arguments. Tells what is different."""
        failed = unproved = ""
        for entry in alike:
            check = entry.failing()
            if check == -1 and entry.generation == self._runtime.generation:
                if entry is not self._entries[0]:
                    self._entries.remove(entry)
                    self._entries.insert(0, entry)
                return entry
            difference = "the backend was changed" if check == -1 else entry.environment.explain(check)
            if entry.replay is None:
                unproved = unproved or difference
            else:
                failed = failed or difference
        if not failed and any(entry.replay is not None for entry in self._entries):
            failed = f"no call with such arguments was replayed before: {', '.join(map(_describe, leaves))}"
        if failed:
            self._guard_failed(failed)
        elif unproved:
            self._reason = unproved
        return None

    def _guard_failed(self, reason: str) -> None:
        self._reason = reason
        events.emit("replay_guard_failed", function=self._name, reason=reason)

    def _replay(self, entry: _Entry, leaves: list[Any]) -> list[torch.Tensor] | None:
        numbers = [] if entry.schedule is None else entry.schedule.evaluate()
        if numbers is None:
            assert entry.schedule is not None
            self._guard_failed(entry.schedule.explain())
            return None
        self._runtime.sync_all("before a replay")  # what fails there has nothing to do with this call
        try:
            made = self._runtime.replay(entry.replay, leaves, numbers)
        except BaseException:
            self._entries.remove(entry)  # its nodes are part of what has failed
            raise
        if isinstance(made, str):
            self._entries.remove(entry)
            self._guard_failed(made)
            return None
        self.replays += 1
        self._fruitless = 0
        entry.used = True
        events.emit("replay", function=self._name)
        return made

    # ---- recording

    def _record(
        self,
        entry: _Entry | None,
        alike: list[_Entry],
        arguments: _Arguments,
        call: Callable[[], T],
        flattened: Callable[[], tuple[TreeSpec | int, list[Any]]],
    ) -> T:
        self.recorded += 1
        if self._reason == _NOT_CALLED:
            self._reason = ""
        if self._pause > 0 or default_devices() is None or not _watching.acquire(blocking=False):
            self._pause = max(self._pause - 1, 0)
            return self._call_only(call)
        try:
            return self._watch(entry, alike, arguments, call, flattened)
        finally:
            _watching.release()

    def _call_only(self, call: Callable[[], T]) -> T:
        with _Inside():
            result = call()
        self._runtime.sync_all("end of a compiled function")
        return result

    def _watch(
        self,
        entry: _Entry | None,
        alike: list[_Entry],
        arguments: _Arguments,
        call: Callable[[], T],
        flattened: Callable[[], tuple[TreeSpec | int, list[Any]]],
    ) -> T:
        self._runtime.sync_all("before a compiled function")
        try:
            environment = Environment(self._function, arguments.leaves)
        except NotReplayableError as reason:
            self._nothing_proved(str(reason))
            return self._call_only(call)
        except Exception as error:  # objects of the user's may do anything when they are looked at
            self._nothing_proved(f"its surroundings cannot be looked at: {type(error).__name__}: {error}")
            return self._call_only(call)
        generation = self._runtime.generation
        steady = [
            known
            for known in alike
            if known.generation == generation and known.environment.failing(with_rates=False) == -1
        ]
        counted, self._counted = self._counted, None
        if counted is not None and counted[0].failing(with_counts=False, with_rates=False) != -1:
            counted = None
        witness = Witness(self._runtime, environment, arguments.leaves)
        try:
            with _Inside():
                result = witness.watch(call)
        except BaseException:
            self._forget(entry)
            raise
        with self._lock:
            try:
                arguments.check_unchanged(*flattened())
                found = _Entry(
                    arguments.without_tensors(), environment, witness.judge(result), witness.rates, generation
                )
            except CountedOnHostError as reason:
                self._nothing_proved(str(reason))
                if counted is not None and reason.evidence.difference(counted[1], numbers=False) is None:
                    self._count_on_device(reason.optimizers)
                else:
                    self._counted = environment, reason.evidence
            except NotReplayableError as reason:
                self._forget(entry)
                self._nothing_proved(str(reason))
            else:
                self._learn(entry, found, alike, steady)
        return result

    def _count_on_device(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Counting is all that stands in the way, twice in a row. A function that is recorded anyway, for something
        else that changes at every call, does not get here, and stays as it is."""
        count_on_device(optimizers)
        names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
        self._reason = f"{names} counted its steps on the host; from now on it does so on the device (capturable=True)"
        log.info("%s: %s", self._name, self._reason)

    def _learn(self, before: _Entry | None, found: _Entry, alike: list[_Entry], steady: list[_Entry]) -> None:
        """A call could be replayed. It will be, if as many before it did the same. `steady` are entries that were made
        in surroundings which it has found unchanged, but for learning rates."""
        if before is not None and before.rates.values == found.rates.values:
            difference = found.evidence.difference(before.evidence)
            if difference is None:
                found.confirmations = before.confirmations + 1
                found.schedule = before.schedule
            else:
                self._nothing_proved(difference)
            self._forget(before)
        elif (followed := self._follow(found, steady)) is not None:
            found.confirmations = followed.confirmations + 1
            self._forget(followed)
        elif (like := _same_step(found, alike)) is not None:
            # The same step with other numbers, and a guard that tells why: a learning rate was changed.
            found.confirmations = like.confirmations
            if not like.used:
                self._nothing_proved(self._reason)
        elif alike and (len(alike) >= MAX_REPLAYS or not any(map(self._may_come_back, alike))):
            self._nothing_proved(self._reason)  # something is different at every call
        if found.confirmations >= self._warm_up:
            found.replay = found.evidence.replay(found.schedule.places if found.schedule else ())
        self._entries = [found, *filter(self._may_come_back, self._entries)][:MAX_REPLAYS]

    def _follow(self, found: _Entry, steady: list[_Entry]) -> _Entry | None:
        """An entry that a call differs from by learning rates alone, so that it shows what follows from them."""
        for entry in steady:
            if (found_schedule := found.follows(entry)) is not None:
                found.schedule = found_schedule
                return entry
        return None

    def _may_come_back(self, entry: _Entry) -> bool:
        """Whether the guards of an entry can hold again: a replaced parameter is not waited for."""
        check = entry.failing()
        return entry.generation == self._runtime.generation and (check == -1 or entry.environment.is_value(check))

    def _forget(self, entry: _Entry | None) -> None:
        if entry is not None and entry in self._entries:
            self._entries.remove(entry)

    def _nothing_proved(self, reason: str) -> None:
        self._reason = reason
        self._fruitless += 1
        if self._fruitless > PATIENCE:
            self._pause = min(2 ** (self._fruitless - PATIENCE), LONGEST_PAUSE)

    # ---- telling

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__qualname__", type(self._function).__name__))

    def explain(self) -> str:
        """Whether calls are replayed, and why not, as text."""
        with self._lock:
            ready = [entry for entry in self._entries if entry.replay is not None]
            lines = [f"{self._name}: {self.recorded} calls recorded, {self.replays} replayed"]
            for entry in ready:
                operations = entry.evidence.snapshot.batch.num_operations
                checks = f"{len(entry.environment)} checks of what the function depends on"
                lines.append(f"  replayed for ({entry.arguments.text}): {operations} operators, {checks}")
            if not ready and self._entries:
                lines.append("  not replayed yet: calls have to do the same a few times in a row first")
            if self._reason:
                lines.append(f"  {'why a call was recorded, lately: ' if ready else ''}{self._reason}")
            if self._pause:
                lines.append(f"  the next {self._pause} calls are recorded without looking at whether they repeat")
            return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<tarry.compile of {self._name}: {self.recorded} calls recorded, {self.replays} replayed>"


def _same_step(found: _Entry, alike: list[_Entry]) -> _Entry | None:
    """An entry that was proved, and does the same but for numbers."""
    for entry in alike:
        if entry.replay is not None and found.evidence.difference(entry.evidence, numbers=False) is None:
            return entry
    return None


class _Inside:
    """Within the block, this thread is in a compiled function."""

    def __enter__(self) -> None:
        _thread.depth = getattr(_thread, "depth", 0) + 1

    def __exit__(self, *exc_info: object) -> None:
        _thread.depth -= 1
