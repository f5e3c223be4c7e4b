"""Finds what a build needs (compiler, ninja, Python's headers), and says what to install where one is missing."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tarry.errors import NativeBuildError

# g++ needs up to 1.6 GB for a source file that includes torch/extension.h (measured: g++ 12, torch 2.13).
BYTES_PER_JOB = 2 * 1024**3
MAX_JOBS = 16


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that answered when asked for its version."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler:
    """The compiler that `CXX` names, else g++, else c++, else clang++."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        version = _version_of(tuple(shlex.split(chosen)))
        if version is None:
            raise NativeBuildError(
                f"tarry's native part must be compiled, and the compiler named by the environment variable "
                f"CXX={chosen!r} cannot be run. Unset CXX to use g++, or set it to a C++20 compiler."
            )
        return Compiler(tuple(shlex.split(chosen)), version)
    for name in ("g++", "c++", "clang++"):
        version = _version_of((name,))
        if version is not None:
            return Compiler((name,), version)
    raise NativeBuildError(
        "tarry's native part must be compiled once for this torch, and no C++ compiler was found.\n"
        "  Debian, Ubuntu:  apt-get install g++\n"
        "  elsewhere:       install g++ 11 or newer, or set CXX to a C++20 compiler\n"
        "Then run: python -m tarry.native"
    )


def _version_of(command: tuple[str, ...]) -> str | None:
    """First line of `command --version`; None if it cannot be run."""
    executable = shutil.which(command[0])
    if executable is None:
        return None
    try:
        done = subprocess.run(
            [executable, *command[1:], "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def find_ninja() -> str:
    """Path of ninja: from the PyPI package `ninja` if this Python has it, else from PATH."""
    for directory in (_package_ninja_directory(), sysconfig.get_path("scripts"), None):
        found = shutil.which("ninja", path=directory)
        if found is not None:
            return found
    raise NativeBuildError(
        "tarry's native part must be compiled once for this torch, and ninja was not found.\n"
        f"  {shlex.quote(sys.executable)} -m pip install ninja\n"
        "Then run: python -m tarry.native"
    )


def _package_ninja_directory() -> str | None:
    try:
        import ninja
    except ImportError:
        return None
    return str(ninja.BIN_DIR)


def python_include() -> Path:
    """The directory of Python.h."""
    include = Path(sysconfig.get_path("include"))
    if (include / "Python.h").is_file():
        return include
    major, minor = sys.version_info[:2]
    raise NativeBuildError(
        f"tarry's native part must be compiled once for this torch, and Python's headers were not found "
        f"(no Python.h in {include}).\n"
        f"  Debian, Ubuntu:  apt-get install python{major}.{minor}-dev\n"
        f"Then run: python -m tarry.native"
    )


def job_count(tasks: int) -> int:
    """How many compilers to run at once: as the processors and the free memory allow. `MAX_JOBS` overrides it."""
    asked = os.environ.get("MAX_JOBS", "").strip()
    if asked:
        if not asked.isdecimal() or int(asked) < 1:
            raise NativeBuildError(f"the environment variable MAX_JOBS must be a positive number, not {asked!r}")
        return int(asked)
    by_memory = _available_memory() // BYTES_PER_JOB
    return max(1, min(len(os.sched_getaffinity(0)), MAX_JOBS, by_memory, tasks))


def _available_memory() -> int:
    """Bytes that a build may use: the machine's available memory, or what is left of a container's limit."""
    available = 1 << 62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    # The page cache counts as used although it gives way, so a limit is only ever taken down to half of itself.
    return available if limit == "max" else min(available, max(int(limit) - used, int(limit) // 2))
