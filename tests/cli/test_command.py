"""The command line: help without torch, exit codes, and the messages for wrong use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tarry.cli import main

ROOT = Path(__file__).resolve().parent.parent.parent

HELP = """\
import sys, tarry_command
try:
    status = tarry_command.main()
except SystemExit as end:
    status = end.code
assert "tarry.cli" in sys.modules
assert "torch" not in sys.modules
sys.exit(status)
"""


def tarry(*arguments: str, code: str) -> subprocess.CompletedProcess[str]:
    """The command's arguments given to a script of our own, in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["doctor", "--help"], ["bench", "--help"]])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    done = tarry(*arguments, code=HELP)
    assert done.returncode == 0, done.stderr
    assert "usage: tarry" in done.stdout


def test_the_package_is_run_when_a_name_of_it_is_used(tmp_path: Path) -> None:
    package = tmp_path / "tarry"
    package.mkdir()
    (package / "__init__.py").write_text("import tarry.part\nvalue = tarry.part.value + 1\n")
    (package / "part.py").write_text("value = 1\n")
    (package / "tool.py").write_text("")
    script = (
        "import sys, tarry_command; tarry_command.defer_package()\n"
        "import tarry.tool, tarry\n"
        "assert 'tarry.part' not in sys.modules\n"
        "assert tarry.value == 2\n"
        "assert tarry.tool\n"
        "try: tarry.missing\n"
        "except AttributeError: print('ordinary')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd=tmp_path,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("ordinary\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--steps", "0"], "'0' is not a positive number"),
        (["demo", "--stepz", "3"], "unrecognized arguments: --stepz 3"),
        (["fly"], "invalid choice: 'fly'"),
        (["run"], "give a script, or -m and a module"),
        (["run", "--compare-eager", "0", "x.py"], "'0' is not a positive number"),
        (["bench", "record", "--quick"], "--quick is for all benchmarks together"),
        ([], "COMMAND"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_failed_build_is_one_message_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tarry.native"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": str(tmp_path), "TARRY_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 1
    assert "no C++ compiler was found" in done.stderr
    assert "Traceback" not in done.stderr


def test_native_help_builds_nothing(tmp_path: Path) -> None:
    for arguments in (["--help"], ["--where"]):
        done = subprocess.run(
            [sys.executable, "-m", "tarry.native", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "TARRY_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)},
            check=False,
        )
        assert "Traceback" not in done.stderr
        assert done.returncode == (0 if arguments == ["--help"] else 1)
        assert ("TARRY_CACHE_DIR" if arguments == ["--help"] else str(tmp_path / "cache")) in done.stdout
    assert not (tmp_path / "cache").exists()


def test_bench_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tarry.cli.bench.__file__", "/nowhere/lib/tarry/cli/bench.py")
    assert main(["bench"]) == 1
    assert "run this from a checkout" in capsys.readouterr().err
