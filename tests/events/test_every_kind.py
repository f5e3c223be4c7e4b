"""Every kind of event is emitted by a program, with that program's line, a cause and, where it costs, a cost."""

from __future__ import annotations

import fcntl
import linecache
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import tarry
from tarry.backends.base import Computation
from tarry.errors import BackendError
from tarry.events import KINDS, Event, record
from tarry.ir.graph import Graph
from tarry.runtime import limits
from tarry.store import Store
from tests.runtime.portable import Portable, using
from tests.support import programs_for_small_graphs

USES_DEVICE = True
__all__ = ["programs_for_small_graphs"]

COUNTED_ONLY = {name for name, kind in KINDS.items() if not kind.topic}
"""Kinds that need no line: nothing about them can be changed."""


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(type(tarry.config), "cache_dir", property(lambda self: tmp_path))
    with tarry.config.override(store=True):
        yield


def _x() -> Tensor:
    return torch.ones(2).to("tarry")


class Broken(Portable):
    """Its programs fail where eager does not."""

    def compile(self, graph: Graph) -> Computation:
        def run(inputs: list[Any], numbers: list[Any]) -> list[Any]:
            raise RuntimeError("no such kernel")

        return Computation(run, graph)


class Choosy(Portable):
    """Lacks an operator."""

    def supports(self, node: Any) -> bool:
        return node.op != "aten::cumsum"


def _collective() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    x = _x()
    dist.all_reduce(x)  # here
    tarry.sync()
    dist.destroy_process_group()


def _sync() -> None:
    x = _x() + 1
    tarry.mark_step()  # here
    del x


def _read() -> None:
    (_x() + 1).sum().item()  # here


def _copy() -> None:
    (_x() + 1).cpu()  # here


def _budget_cut() -> None:
    x = _x()
    with tarry.config.override(max_pending_nodes=4):
        for _ in range(6):
            x = x + 1  # here


def _interpreted() -> None:
    with using(Portable(manner="gives up")), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (_x() + 1).tolist()  # here


def _fallback() -> None:
    torch.nonzero(_x())  # here


def _fallback_of_a_backend() -> None:
    with using(Choosy()):
        y = _x().cumsum(0)  # here
        y.tolist()


def _compile() -> None:
    with using(Portable()):
        (_x() + 1).tolist()  # here


def _recompile() -> None:
    with using(Portable()), tarry.config.override(symbolic_sizes=False):
        for size in (2, 3):
            (torch.ones(size).to("tarry") + 1).tolist()  # here


def _takeover() -> None:
    with using(Portable(recipe=False), "background"):
        for _ in range(2 + 2 + limits.TAKEOVER_STEPS):
            (_x() + 1).tolist()  # here
            tarry.wait_for_compiles()


def _compile_here() -> None:
    with using(Portable(recipe=False), "background"):
        for _ in range(3):
            (_x() + 1).tolist()  # here
        tarry.wait_for_compiles()


def _pieces() -> None:
    from tests.runtime.test_pieces import OPTIMIZERS, InPieces, Network, _ids

    model = Network().to("tarry")
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    with using(InPieces()):
        model(torch.ones(3, 8).to("tarry"), _ids("tarry")).backward()
        optimizer.step()  # here


def _store_hit() -> None:
    for _ in range(2):
        with using(Portable()):
            (_x() + 1).tolist()  # here


def _store_wait() -> None:
    store = Store(tarry.config.cache_dir / "programs", 1 << 20)
    with record() as seen, using(Portable()):
        (_x() + 1).tolist()
    (key,) = [event.fields["key"] for event in seen if event.kind == "store_miss"]
    (path,) = store.directory.glob(f"{key}*")
    path.unlink()
    lock = os.open(path.with_suffix(".claim"), os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, [lock]).start()  # as if another process compiled
    with using(Portable()):
        (_x() + 1).tolist()  # here


def _store_skip() -> None:
    with using(Portable(manner="cannot be stored")):
        (_x() + 1).tolist()  # here


def _store_evict() -> None:
    with using(Portable()), tarry.config.override(max_stored_bytes=900):
        for size in range(2, 8):
            torch.ones(size).to("tarry").sin().tolist()  # here


def _store_corrupt() -> None:
    with using(Portable()):
        (_x() + 1).tolist()  # here
    for path in (tarry.config.cache_dir / "programs").glob("*.program"):
        path.write_bytes(path.read_bytes()[:-3])
    _store_hit()


def _replays(step: Callable[[Tensor], Any], times: int = 8, **options: Any) -> None:
    compiled = tarry.compile(step, **options)
    x = _x()
    for _ in range(times):
        compiled(x)  # here


def _replay() -> None:
    _replays(lambda x: x + 1)


def _replay_verified() -> None:
    _replays(lambda x: x + 1, verify=1)


def _replay_refused() -> None:
    _replays(lambda x: x.sum().item())


def _replay_guard_failed() -> None:
    step = tarry.compile(lambda x, flag: x + 1 if flag else x - 1)
    for k in range(8):
        step(_x(), k < 6)  # here


def _replay_deviation() -> None:
    from tests.replay.test_verification import _hostile

    scale, step = _hostile(on_deviation="warn")
    scale.value = 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12):
            step(_x())  # here


def _error() -> None:
    y = torch.nn.functional.embedding(torch.tensor([7], device="tarry"), torch.ones(3, 2, device="tarry"))
    with pytest.raises(IndexError):
        y.tolist()  # here


def _backend_fault() -> None:
    with using(Broken()), pytest.raises(BackendError):
        (_x() + 1).tolist()  # here


def _compile_fault() -> None:
    with using(Portable(manner="fails")):
        y = _x() + 1
        with pytest.raises(BackendError):
            y.tolist()  # here
        del y


def _transfer() -> None:
    from tests.backends.simulated import Accelerator

    with using(Accelerator()):
        (_x() + 1).tolist()


def _torch_compile() -> None:
    torch.compile(lambda x: x + 1)(_x())  # here


PROGRAMS: dict[str, tuple[Callable[[], None], ...]] = {
    "sync": (_sync, _read),
    "read": (_read, _copy),
    "budget_cut": (_budget_cut,),
    "reference": (_takeover,),
    "interpreted": (_interpreted,),
    "fallback": (_fallback, _fallback_of_a_backend),
    "execute": (_sync,),
    "cache_hit": (_takeover,),
    "transfer": (_transfer,),
    "collective": (_collective,),
    "compiling": (_compile, _recompile, _takeover),
    "compile": (_compile, _recompile, _takeover),
    "slow_compile": (_compile, _takeover),
    "takeover": (_takeover,),
    "torch_compile": (_torch_compile,),
    "pieces": (_pieces,),
    "compile_here": (_compile_here,),
    "store_hit": (_store_hit,),
    "store_miss": (_compile,),
    "store_wait": (_store_wait,),
    "store_skip": (_store_skip,),
    "store_evict": (_store_evict,),
    "store_corrupt": (_store_corrupt,),
    "replay": (_replay,),
    "replay_refused": (_replay_refused,),
    "replay_guard_failed": (_replay_guard_failed,),
    "replay_verified": (_replay_verified,),
    "replay_deviation": (_replay_deviation,),
    "error": (_error, _compile_fault),
    "backend_fault": (_backend_fault, _compile_fault),
}


def test_there_is_a_program_for_every_kind() -> None:
    assert PROGRAMS.keys() == KINDS.keys()


CASES = [pytest.param(kind, program, id=f"{kind}{program.__name__}") for kind in PROGRAMS for program in PROGRAMS[kind]]


@pytest.mark.parametrize(("kind", "program"), CASES)
def test_it_has_the_users_line_and_a_cause(
    kind: str, program: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLOW_COMPILE_SECONDS", -1.0)
    with record() as seen:
        program()
    found = [event for event in seen if event.kind == kind]
    assert found, {event.kind for event in seen}
    if kind in COUNTED_ONLY:
        return
    for event in found:
        assert event.fields["file"] == __file__, event
        assert "# here" in linecache.getline(__file__, event.fields["line"]), event
    last = found[-1].fields
    assert last["reason"] or kind in ("read", "torch_compile") or last.get("error"), last
    if kind in (
        "sync",
        "read",
        "budget_cut",
        "fallback",
        "compile",
        "slow_compile",
        "takeover",
        "store_hit",
        "store_miss",
        "store_wait",
    ):
        assert last["seconds"] > 0


def _last(kind: str, program: Callable[[], None]) -> Event:
    with record() as seen:
        program()
    return [event for event in seen if event.kind == kind][-1]


def test_a_first_compile_is_told_from_one_that_is_needed_again() -> None:
    assert not _last("compile", _compile).fields["again"]
    again = _last("compile", _recompile).fields
    assert again["again"]
    assert "3" in again["reason"]


def test_a_takeover_has_the_pace_before_and_after() -> None:
    fields = _last("takeover", _takeover).fields
    assert fields["before"] > 0
    assert fields["after"] > 0
    assert fields["operations"] == 1


def test_a_miss_of_the_store_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from tarry.store import identity

    def miss() -> str:
        return str(_last("store_miss", _compile).fields["reason"])

    assert miss() == "no program of this graph is stored"
    versions = identity._versions()
    for name, value in (("torch", "9.9"), ("sources of tarry", "x" * 64), ("Python", "2.7")):
        changed = tuple((k, value if k == name else v) for k, v in versions)
        monkeypatch.setattr(identity, "_versions", lambda changed=changed: changed)
        reason = miss()
        assert reason.startswith("programs of this graph are stored, but for ")
        assert name in reason
    monkeypatch.setattr(identity, "_versions", lambda: versions)
    monkeypatch.setattr(Portable, "fingerprint", lambda self: "another option")
    assert "settings of the backend" in miss()


def test_a_damaged_program_is_the_cause_of_a_miss() -> None:
    assert "the checksum is wrong" in _last("store_miss", _store_corrupt).fields["reason"]
