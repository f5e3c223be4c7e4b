"""scripts/environment.sh: what it does where the system lacks a compiler, Python's headers or the module venv."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "environment.sh"


Done = subprocess.CompletedProcess[str]


def run(folder: Path, *, uid: int, tools: tuple[str, ...] = (), lacks: str = "nothing") -> Done:
    """Call `system_packages` with a PATH of stand-ins: `tools` log their calls, Python lacks one thing."""
    tool = '#!/bin/sh\necho "$0 $*" >> {log}\n'
    for name in tools:
        (folder / name).write_text(tool.format(log=folder / "calls"))
    (folder / "id").write_text(f"#!/bin/sh\necho {uid}\n")
    python = f'#!/bin/sh\ncase "$2" in *version_info*) echo 3.12;; *{lacks}*) exit 1;; esac\n'
    (folder / "python3").write_text(python)
    for path in folder.iterdir():
        path.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    command = [bash, "-c", f"source {SCRIPT}; system_packages"]
    return subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True, check=False)


def test_nothing_is_installed_where_nothing_is_missing(tmp_path: Path) -> None:
    done = run(tmp_path, uid=0, tools=("g++", "apt-get"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("tools", "lacks", "package"),
    [
        ((), "nothing", "g++"),
        (("g++",), "Python.h", "python3.12-dev"),
        (("g++",), "ensurepip", "python3.12-venv"),
    ],
)
def test_root_on_debian_installs_what_is_missing(
    tmp_path: Path, tools: tuple[str, ...], lacks: str, package: str
) -> None:
    done = run(tmp_path, uid=0, tools=(*tools, "apt-get"), lacks=lacks)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text().splitlines()[-1].endswith(f"apt-get install -y -q {package}")


@pytest.mark.parametrize(
    ("tool", "line"),
    [("apt-get", "sudo apt-get install -y g++"), ("dnf", "sudo dnf install -y gcc-c++"), ("ls", "missing: g++")],
)
def test_others_are_given_the_line(tmp_path: Path, tool: str, line: str) -> None:
    done = run(tmp_path, uid=1000, tools=(tool,))
    assert done.returncode == 1
    assert line in done.stderr
    assert not (tmp_path / "calls").exists()
