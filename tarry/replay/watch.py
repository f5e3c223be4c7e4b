"""Watching a call of a step function, and judging whether it can be replayed.

A call can be replayed if it records one graph, and if all that the graph reads and writes is understood: it comes from
the arguments or outlives the call, and goes to the results, to gradients, or to tensors that outlive the call.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy
import torch

from tarry.native import C
from tarry.pytree import TreeSpec
from tarry.replay.autograd import graph_is_alive
from tarry.replay.capture import Capture, CountedOnHostError, Made, Result, StorageRef, flatten_result
from tarry.replay.checks import PLAIN
from tarry.replay.guards import Guards, state_of
from tarry.replay.host import HostWatch
from tarry.replay.rates import RateWatch
from tarry.replay.reasons import DisturbedError, NotReplayableError, where
from tarry.runtime.runtime import Runtime


def _host_rng() -> list[Any]:
    """The states of the generators that functions on the host draw from."""
    return [state_of(each) for each in (torch.default_generator, random, numpy.random)]


class Watch:
    """Watches one call. `rates` are parameter groups whose learning rates are to note what is computed from them.

    A call that is compared with a `plan` need not be looked at as closely: what follows from a value that it has read,
    or drawn, shows in its graph."""

    def __init__(
        self,
        runtime: Runtime,
        guards: Guards,
        leaves: list[Any],
        rates: Sequence[dict[str, Any]] = (),
        *,
        plan: Capture | None = None,
    ) -> None:
        self._is_verified = plan is not None
        self._sees_host = plan is None or bool(plan.hosts)  # which may be literals
        self._runtime = runtime
        self._guards = guards
        self._leaves = leaves
        self._device = C.current_device()
        self._holders = guards.holders
        self._argument_holders = [
            (k, t) for k, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf
        ]
        self._snapshots: list[Any] = []
        self._argument_gradients: list[int] = []
        self._host_rng: list[Any] | None = None
        self._generators: list[tuple[str, Any]] = []
        self.disturbed = False
        self.rates = RateWatch(rates)

    def run(self, call: Callable[[], Any]) -> Any:
        """Call, and note what happens. What the call raises is raised. Nothing is pending when it begins."""
        runtime = self._runtime
        if self._argument_holders:
            self._argument_gradients = C.gradient_serials([t for _, t in self._argument_holders])
        self._gradients = C.gradient_serials(self._holders)
        self._device_rng = C.random_position(self._device)
        if not self._is_verified:
            self._host_rng = _host_rng()
            self._generators = self._guards.generator_states()
        self._closures = runtime.closures_added
        self._rates_before = self._rates_now()
        self._trace = C.Trace(self._device)
        thread = threading.get_ident()

        def observe(batch: Any) -> None:
            self.disturbed = self.disturbed or threading.get_ident() != thread
            self._snapshots.append(C.Snapshot(batch, self._trace))

        runtime.observe(observe)
        self._host = HostWatch(self._trace, self._guards.counts.keys()) if self._sees_host else None
        try:
            with self._host or nullcontext(), self.rates:
                result = call()
            runtime.sync_all("end of a compiled function")
            self._reads, self._overwritten = self._trace.reads, self._trace.overwritten
            self._first_serial = self._trace.first_serial
            self.disturbed = self.disturbed or self._trace.shared
        finally:
            runtime.observe(None)
            del self._trace
        return result

    # ---- the verdict

    def _rates_now(self) -> str:
        return repr([group["lr"] for group in self._guards.rates])

    def judge(self, result: Any) -> Capture:
        """What the call did. Raises NotReplayableError if a replay could not do the same."""
        if self.disturbed:
            raise DisturbedError("another thread recorded something, or needed a value, during the call")
        self._check_conduct()
        snapshot = self._snapshots[0]
        self._kept: dict[int, int] = {}  # serials, numbered
        self._note_arguments()
        hosts: list[torch.Tensor] = []
        sources = [self._source(leaf, hosts) for leaf in snapshot.leaves()]
        snapshot.forget_uploads()
        self._made_storages = {s: k for k, s in enumerate(snapshot.root_serials) if s >= self._first_serial}
        self._claimed: dict[int, int] = {}  # serials of those that outlive the call, numbered
        results, tree, made = self._results(result)
        gradients = self._new_gradients()
        targets = self._targets(snapshot)
        draws, seeds = self._draws(snapshot)
        written = {serial for serial in snapshot.root_serials if serial and serial < self._first_serial}
        capture = Capture(
            snapshot=snapshot,
            sources=sources,
            targets=targets,
            kept=list(self._kept),
            seeds=seeds,
            draws=draws,
            made=made,
            gradients=gradients,
            holders=self._holders,
            hosts=hosts,
            host_identities=[self._identity(t) for t in hosts],
            results=results,
            result_tree=tree,
            in_graph=[isinstance(t, torch.Tensor) and t.requires_grad for t in flatten_result(result)[0]],
            written=[t for t in self._guards.tensors if C.storage_serial(t) in written],
        )
        counted = self._guards.counted_on_host()
        if counted:  # the last obstacle, which may be removed
            raise CountedOnHostError(self._guards.changed_host_tensor(), counted, capture)
        return capture

    def _check_conduct(self) -> None:
        """What the call must not do, whatever its graph is."""
        name = self._guards.changed_host_tensor(with_counts=False)
        if name is not None:
            advice = ": give the optimizer capturable=True" if name.endswith("['step']") else ""
            raise NotReplayableError(f"it changes {name}, a tensor on the host, which a replay would not{advice}")
        if self._runtime.closures_added != self._closures:
            raise NotReplayableError("it adds a step closure, which a replay would not. Add it outside of the function")
        if self._reads:  # after the above: a closure that has run has read its values
            raise NotReplayableError(
                f"it reads a value at {where(self._reads[0])}, which a replay would not. Return the tensor, and read "
                f"it outside of the function"
            )
        if self._host is not None:
            self._host.check()  # after the above: a value that is read is a host tensor for a moment
        if self._overwritten:
            raise NotReplayableError(
                f"it copies a host tensor into an existing one at {where(self._overwritten[0])}. Pass the host tensor "
                f"as an argument, and move it with .to('tarry')"
            )
        if self._rates_now() != self._rates_before:
            raise NotReplayableError("it changes its surroundings: the learning rate of an optimizer")
        changed = self._guards.failing(with_gradients=False, with_counts=False, with_rates=not self._guards.rates)
        if changed != -1:
            raise NotReplayableError(f"it changes its surroundings: {self._guards.explain_failing(changed)}")
        if self._host_rng is not None and _host_rng() != self._host_rng:
            raise NotReplayableError("it draws random numbers on the host. Draw them on device 'tarry'")
        for (name, before), (_, after) in zip(self._generators, self._guards.generator_states(), strict=False):
            if before != after:
                raise NotReplayableError(f"it draws random numbers from {name}. Draw from the device's own generator")
        if not self._snapshots:
            raise NotReplayableError("it records nothing")
        if len(self._snapshots) != 1:
            raise NotReplayableError(
                f"it is computed in {len(self._snapshots)} parts, because of a mark_step, a sync, or an operator that "
                f"runs eagerly"
            )
        if not self._snapshots[0].whole:
            raise DisturbedError("it depends on a step that was interrupted, or failed")
        if self._snapshots[0].batch.device != self._device:
            raise NotReplayableError("it computes on another device than the current one")

    def _note_arguments(self) -> None:
        self._arguments: dict[int, int] = {}
        for k, leaf in enumerate(self._leaves):
            if isinstance(leaf, torch.Tensor):
                if leaf.grad_fn is not None:
                    raise NotReplayableError(f"argument {k} has a grad_fn: a backward pass would leave the function")
                if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                    raise NotReplayableError(
                        f"argument {k} is a {type(leaf).__name__}, whose class may change what operators do"
                    )
                if leaf.__dict__:
                    raise NotReplayableError(f"argument {k} is a tensor with attributes: {', '.join(leaf.__dict__)}")
                serial = C.storage_serial(leaf)
                if serial:
                    self._arguments.setdefault(serial, k)
        for tensor in self._guards.tensors:
            if tensor.grad_fn is not None:
                raise NotReplayableError(
                    f"{self._guards.names[id(tensor)]} has a grad_fn: a backward pass would leave the function"
                )
        self._old_gradients = {serial: k for k, serial in enumerate(self._gradients) if serial}

    def _ref(self, serial: int) -> StorageRef | None:
        """Where a storage that existed before the call comes from."""
        if serial and serial in self._argument_gradients:
            raise NotReplayableError("it uses the .grad that an argument had before the call")
        if serial in self._arguments:
            return "argument", self._arguments[serial]
        if serial in self._old_gradients:
            return "gradient", self._old_gradients[serial]
        if not serial or serial >= self._first_serial:
            return None
        return "kept", self._kept.setdefault(serial, len(self._kept))

    def _source(self, described: tuple[int, torch.Tensor | None, str, int], hosts: list[torch.Tensor]) -> StorageRef:
        serial, uploaded, file, line = described
        if uploaded is None:
            ref = self._ref(serial)
            if ref is None:
                raise NotReplayableError(f"it uses a tensor at {where((file, line))} that it made without recording it")
            return ref
        for k, leaf in enumerate(self._leaves):
            if leaf is uploaded:
                return "uploaded", k
        if any(tensor is uploaded for tensor in self._guards.tensors) or (
            self._host is not None and self._host.is_literal(uploaded)
        ):
            if not any(uploaded is host for host in hosts):
                hosts.append(uploaded)
            return "host", next(k for k, host in enumerate(hosts) if host is uploaded)
        raise NotReplayableError(
            f"it uses a host tensor at {where((file, line))} that was made inside the function. Make it outside, or on "
            f"device 'tarry', or pass it as an argument"
        )

    def _identity(self, host: torch.Tensor) -> Any:
        """What two calls must agree in about a host tensor that they use: the contents of one that each has made."""
        if id(host) in self._guards.names:
            return id(host)
        return host.dtype, tuple(host.shape), bytes(host.contiguous().flatten().view(torch.uint8).tolist())

    def _targets(self, snapshot: Any) -> list[StorageRef]:
        for attempt in range(2):
            targets: list[StorageRef] = []
            unknown = []
            for k, serial in enumerate(snapshot.root_serials):
                ref = self._ref(serial)
                if ref is None:
                    if serial in self._claimed:
                        ref = "fresh", self._claimed[serial]
                    else:
                        ref = "dropped", 0
                        if serial and snapshot.root_is_alive(k):
                            unknown.append(k)
                targets.append(ref)
            if not unknown:
                return targets
            if attempt == 0:
                gc.collect()  # perhaps a cycle is all that keeps them
        raise NotReplayableError(
            f"a tensor made at {where(snapshot.root_location(unknown[0]))} is kept when the call is over, by something "
            f"other than its result or a .grad"
        )

    def _claim(self, serial: int) -> StorageRef:
        return "fresh", self._claimed.setdefault(serial, len(self._claimed))

    def _new_gradients(self) -> list[tuple[StorageRef, Made | None]]:
        changes: list[tuple[StorageRef, Made | None]] = []
        owners: list[tuple[StorageRef, torch.Tensor, int]] = [
            (("kept", k), t, before) for k, (t, before) in enumerate(zip(self._holders, self._gradients, strict=True))
        ]
        for (k, t), before in zip(self._argument_holders, self._argument_gradients, strict=True):
            owners.append((("argument", k), t, before))
        for ref, tensor, before in owners:
            gradient = tensor.grad
            after = 0 if gradient is None else C.storage_serial(gradient)
            if gradient is None:
                if before:
                    changes.append((ref, None))
            elif after != before:
                if after not in self._made_storages or gradient.requires_grad:
                    raise NotReplayableError("it sets a .grad to a tensor that is not simply computed in the call")
                changes.append((ref, _made(self._claim(after), gradient)))
        known = {id(tensor) for _, tensor, _ in owners}
        for tensor in self._host.set_attributes if self._host is not None else ():
            serial = C.storage_serial(tensor)
            if id(tensor) not in known and serial and serial < self._first_serial:
                raise NotReplayableError(
                    "it sets .grad, .data or .requires_grad of a tensor that none of its guards leads to. Name the "
                    "module or the optimizer that has the tensor in the function"
                )
        return changes

    def _results(self, result: Any) -> tuple[list[Result], TreeSpec, list[Made]]:
        leaves, tree = flatten_result(result)
        results: list[Result] = []
        made: list[Made] = []
        numbered: dict[int, int] = {}
        for leaf in leaves:
            found = next((k for k, argument in enumerate(self._leaves) if argument is leaf), None)
            if isinstance(leaf, (*PLAIN, torch.Size)):
                results.append(Result("value", leaf))
            elif found is not None:
                results.append(Result("argument", found))
            elif not isinstance(leaf, torch.Tensor) or id(leaf) in self._guards.names:
                results.append(Result("object", leaf))
            else:
                if id(leaf) not in numbered:
                    numbered[id(leaf)] = len(made)
                    made.append(_made(self._result_ref(leaf), leaf))
                results.append(Result("made", numbered[id(leaf)]))
        return results, tree, made

    def _result_ref(self, tensor: torch.Tensor) -> StorageRef:
        if tensor.device.type != "tarry":
            raise NotReplayableError("it returns a tensor on the host that it has made. Return one on device 'tarry'")
        if tensor.requires_grad and not self._is_verified and (tensor.is_leaf or graph_is_alive(tensor)):
            raise NotReplayableError(
                "it returns a tensor that backward() can still be called on, and a replay has no graph for that. "
                "Return it detached: .detach()"
            )
        if type(tensor) is not torch.Tensor:
            raise NotReplayableError(f"it returns a {type(tensor).__name__}, and a replay makes plain tensors")
        if tensor.is_conj() or tensor.is_neg():
            raise NotReplayableError("it returns a conjugated or negated view. Call .resolve_conj() on it")
        serial = C.storage_serial(tensor)
        if serial in self._made_storages:
            return self._claim(serial)
        ref = self._ref(serial)
        if ref is None or ref[0] == "kept":
            raise NotReplayableError("it returns a tensor that it has not computed: a copy of a host tensor, or a view")
        return ref

    def _draws(self, snapshot: Any) -> tuple[int, list[tuple[int, int]]]:
        """How many seeds the call has drawn, and which random node has which of them."""
        before, after = self._device_rng, C.random_position(self._device)
        if before[0] != after[0] or after[1] < before[1]:
            raise NotReplayableError("it seeds the generator of device 'tarry'. Seed outside of the function")
        draws = after[1] - before[1]
        drawn = {C.derive_seed(before[0], before[1] + k): k for k in range(draws)}
        seeds = []
        for node, seed in snapshot.random_nodes():
            if seed not in drawn:
                raise NotReplayableError("it draws random numbers from another generator than the device's own")
            seeds.append((node, drawn[seed]))
        return draws, seeds


def _made(ref: StorageRef, tensor: torch.Tensor) -> Made:
    return ref, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
