"""Several processes at one cache: one builds and the rest wait; a killed one leaves nothing in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.native.support import start_loading, tiny, wrapper


def wait_for(path: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)


def expect_waiting(process: subprocess.Popen[str], holder: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    assert f"another process (pid {holder.pid}) is building the native part; waiting" in process.stderr.readline()


def test_two_processes_build_once(tmp_path: Path) -> None:
    extension = tiny(tmp_path)
    environment = {"TARRY_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(wrapper(tmp_path))}
    first = start_loading(extension, **environment)
    wait_for(tmp_path / "compilations")  # the first one holds the lock and compiles
    second = start_loading(extension, **environment)
    expect_waiting(second, first)
    (tmp_path / "hang").unlink()
    outputs = [process.communicate(timeout=300) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert [out.strip() for out, _ in outputs] == ["42", "42"]
    assert len((tmp_path / "compilations").read_text().split()) == 2, "one compilation for each of the two sources"


def test_a_waiting_process_takes_over_from_a_killed_one(tmp_path: Path) -> None:
    extension = tiny(tmp_path)
    environment = {"TARRY_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(wrapper(tmp_path))}
    first = start_loading(extension, **environment)
    try:
        wait_for(tmp_path / "compilations")
        second = start_loading(extension, **environment)
        expect_waiting(second, first)
        os.kill(first.pid, signal.SIGKILL)  # only Python: its compilers live on, as after the OOM killer
        (tmp_path / "hang").unlink()
        out, err = second.communicate(timeout=300)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
    assert (second.returncode, out.strip()) == (0, "42"), err
    assert not list(tmp_path.glob("cache/native/*/build-*")), "the killed build's temporary directory is left"


def test_a_build_after_a_kill_needs_no_help(tmp_path: Path) -> None:
    extension = tiny(tmp_path)
    environment = {"TARRY_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(wrapper(tmp_path))}
    first = start_loading(extension, **environment)
    wait_for(tmp_path / "compilations")
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    (tmp_path / "hang").unlink()
    second = start_loading(extension, **environment)
    out, err = second.communicate(timeout=300)
    assert (second.returncode, out.strip()) == (0, "42"), err
    assert "waiting" not in err
