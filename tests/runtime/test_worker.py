"""Compiling in another process: it compiles as this one would, may die, and never outlives or holds up this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tarry
from tarry import _api
from tarry.backends.base import Capabilities
from tarry.events import record
from tarry.runtime import limits
from tarry.runtime.compile.device_guard import keep_device_guard
from tarry.runtime.compile.process import CannotError, CompileProcess
from tests.runtime.portable import Portable, using

USES_DEVICE = True


@pytest.fixture(autouse=True)
def _no_worker_left() -> Iterator[None]:
    yield
    _api._runtime._compiler._process.close()


def _worker() -> int:
    pid = _api._runtime._compiler._process.pid
    assert pid is not None
    return pid


def _compile(backend: Portable, factor: float = 3.0) -> Counter[str]:
    """A graph that comes often enough to be compiled, and what happened."""
    x = torch.ones(2).to("tarry")
    with record() as seen:
        for _ in range(2):
            assert (x.sin() * factor).tolist() == pytest.approx((x.cpu().sin() * factor).tolist())
        assert tarry.wait_for_compiles(120)
        assert (x.sin() * factor).tolist() == pytest.approx((x.cpu().sin() * factor).tolist())
    return Counter(event.kind for event in seen)


def test_another_process_compiles(tmp_path: Path) -> None:
    backend = Portable(diary=tmp_path / "diary")
    with using(backend, "background"):
        kinds = _compile(backend)
        assert (kinds["compile"], kinds["reference"], kinds["compile_here"]) == (1, 2, 0)
        x = torch.ones(3).to("tarry")
        for _ in range(2):
            x.cos().tolist()
        tarry.wait_for_compiles()
        first, second = backend.compilers()
        assert first == second == _worker() != os.getpid()


def test_what_it_does_not_know_is_compiled_here(tmp_path: Path) -> None:
    @tarry.custom_op("tarry_test_worker::twice")
    def twice(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    twice.impl("cpu")(lambda x: x * 2)
    twice.impl_abstract()(torch.empty_like)

    backend = Portable(diary=tmp_path / "diary")
    x = torch.ones(2).to("tarry")
    with using(backend, "background"), record() as seen:
        for _ in range(2):
            twice(x).tolist()
        tarry.wait_for_compiles()
        assert twice(x).tolist() == [2.0, 2.0]
    assert backend.compilers() == [os.getpid()]
    (event,) = [event for event in seen if event.kind == "compile_here"]
    assert "tarry_test_worker" in event.fields["reason"]


@pytest.mark.parametrize(
    "backend",
    [Portable(recipe=False), Portable(manner="no artifact"), Portable(manner="cannot be stored")],
    ids=["no recipe", "no artifact", "cannot be stored"],
)
def test_a_backend_that_cannot_leave_the_process_compiles_here(tmp_path: Path, backend: Portable) -> None:
    backend.diary = tmp_path / "diary"
    with using(backend, "background"):
        kinds = _compile(backend)
    assert (kinds["compile"], kinds["compile_here"]) == (1, 1)
    assert backend.compilers()[-1] == os.getpid()


def test_a_worker_that_dies_is_replaced_once(tmp_path: Path) -> None:
    backend = Portable(diary=tmp_path / "diary", manner="dies once")
    with using(backend, "background"):
        assert _compile(backend)["compile"] == 1
    first, second = backend.compilers()
    assert first != second
    assert os.getpid() not in (first, second)


def test_a_graph_over_which_workers_die_stays_on_the_reference_path(tmp_path: Path) -> None:
    backend = Portable(diary=tmp_path / "diary", manner="dies")
    with using(backend, "background"):
        with pytest.warns(UserWarning, match=r"died: killed by SIGKILL.*keeps using the reference path"):
            kinds = _compile(backend)
        assert (kinds["compile"], kinds["error"], kinds["reference"]) == (0, 1, 3)
    assert len(backend.compilers()) == 2
    assert os.getpid() not in backend.compilers()


@pytest.mark.parametrize(("manner", "message"), [("fails", "the compiler is broken"), ("gives up", "it is too hard")])
def test_what_its_compiler_says_is_said_here(manner: str, message: str) -> None:
    backend = Portable(manner=manner)
    with using(backend, "background"), pytest.warns(UserWarning, match=message):
        _compile(backend)


def test_a_worker_that_cannot_be_started_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    process = CompileProcess()
    monkeypatch.setattr(_api._runtime._compiler, "_process", process)
    backend = Portable(diary=tmp_path / "diary")
    with using(backend, "background"):
        kinds = _compile(backend)
    assert (kinds["compile"], kinds["compile_here"]) == (1, 1)
    assert backend.compilers() == [os.getpid()]
    with pytest.raises(CannotError, match="could be started"):
        process._ensure_started()


def test_a_backend_that_goes_ends_its_compile(tmp_path: Path) -> None:
    backend = Portable(diary=tmp_path / "diary", manner="slow")
    x = torch.ones(2).to("tarry")
    with using(backend, "background"):
        for _ in range(2):
            x.sin().tolist()
        while not backend.compilers():
            time.sleep(0.01)
    assert tarry.wait_for_compiles(0)
    assert _gone(backend.compilers()[0])
    assert "error" not in tarry.metrics.counters()


def _gone(pid: int) -> bool:
    """Whether a process ends soon."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


PROGRAM = """
import os, sys, time, signal
from pathlib import Path
import torch, tarry
from tarry.runtime import limits
from tests.runtime.portable import Portable
limits.SMALL_OPERATIONS = 0  # small graphs get programs, too
backend = Portable(diary=Path(sys.argv[1]), manner="slow", recipe={recipe})
tarry.set_backend(backend, compile="background")
x = torch.ones(2).to("tarry")
for _ in range(2):
    x.sin().tolist()
while not backend.compilers():
    time.sleep(0.01)
{end}
"""


@pytest.mark.parametrize("recipe", [True, False], ids=["another process", "a thread"])
def test_a_process_and_its_child_end_with_a_compile_in_flight(tmp_path: Path, recipe: bool) -> None:
    end = textwrap.dedent(
        """
        if (pid := os.fork()) == 0:
            tarry._api._at_exit()
            os._exit(0)  # PyTorch would wait ten seconds for threads that only the parent has
        assert os.waitpid(pid, 0)[1] == 0
        os.kill(backend.compilers()[0], 0)  # it is still there
        """
    )
    program = PROGRAM.format(recipe=recipe, end=end)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, tmp_path / "diary"],  # Python's, of os.fork
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    (compiler,) = (int(line) for line in (tmp_path / "diary").read_text().split())
    assert _gone(compiler)


def test_a_worker_does_not_outlive_a_process_that_is_killed(tmp_path: Path) -> None:
    end = textwrap.dedent(
        """
        if os.fork() == 0:
            time.sleep(30)  # a child must not keep the pipe open
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    program = PROGRAM.format(recipe=True, end=end)
    with subprocess.Popen([sys.executable, "-c", program, tmp_path / "diary"], cwd=Path(__file__).parents[2]) as child:
        assert child.wait(300) == -signal.SIGKILL
    (compiler,) = (int(line) for line in (tmp_path / "diary").read_text().split())
    assert _gone(compiler)


class PortableToADevice(Portable):
    """On module level: the process that compiles imports it by its name."""

    capabilities = Capabilities(asynchronous=True)


@pytest.mark.parametrize("cores", [1, 10_000])
def test_a_worker_is_there_before_the_first_graph_where_there_are_cores_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(limits, "WARM_UP_CORES", cores)
    backend = PortableToADevice(diary=tmp_path / "diary")
    with using(backend, "background"):
        assert tarry.wait_for_compiles(120)
        assert len(backend.compilers()) == (1 if cores == 1 else 0)
        if cores == 1:
            assert backend.compilers() == [_worker()]
            assert _compile(backend)["compile"] == 1
            assert set(backend.compilers()) == {_worker()}
    with using(backend, "wait"):
        assert tarry.wait_for_compiles(120)
    assert len(backend.compilers()) == (2 if cores == 1 else 0)


def test_a_guard_for_cuda_stays_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11, built for CUDA, crashes in the second compile without it: its guard dies with its thread."""
    calls: list[threading.Thread] = []
    monkeypatch.setattr(
        torch._C, "_ensureCUDADeviceGuardSet", lambda: calls.append(threading.current_thread()), raising=False
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    keep_device_guard.__wrapped__()
    torch._C._ensureCUDADeviceGuardSet()  # as FakeTensorMode does, on a thread that ends
    (thread,) = calls
    assert thread.is_alive()
    assert thread.daemon
