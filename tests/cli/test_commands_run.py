"""Each command, run as a user runs it: the demo, the doctor, the benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.slow  # each is a process of its own that loads torch and tarry


def tarry(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tarry_command.py", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


def test_demo_agrees_with_eager_and_reports_its_work() -> None:
    done = tarry("demo", "--steps", "4", "--backend", "eager", COLUMNS="120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "match" in done.stdout
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in done.stdout.splitlines() if "│" in line}
    assert int(rows["operators recorded"].replace(",", "")) > 4 * 500
    assert (rows["graphs run"], rows["compiles"], rows["recompiles"]) == ("4", "2", "0")
    assert rows["fallbacks"] == "0"


def test_quiet_demo_is_one_line() -> None:
    done = tarry("demo", "--steps", "2", "--quiet", TARRY_COMPILE="background")
    assert done.returncode == 0, done.stderr  # two steps are two graphs, seen once: nothing is compiled
    (line,) = done.stdout.splitlines()
    assert "match" in line


def test_demo_fails_where_losses_differ() -> None:
    done = tarry("demo", "--steps", "2", "--quiet", "--backend", "null")  # computes nothing
    assert done.returncode == 1
    assert "DIFFER" in done.stdout


def test_demo_with_an_unknown_backend() -> None:
    done = tarry("demo", "--backend", "eagre")
    assert done.returncode == 1
    assert "there is no backend 'eagre'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the message for machines without CUDA")
def test_demo_without_cuda() -> None:
    done = tarry("demo", "--device", "cuda")
    assert done.returncode == 1
    assert "torch sees no CUDA device here" in done.stderr


@pytest.mark.gpu
def test_demo_on_cuda() -> None:
    done = tarry("demo", "--steps", "4", "--device", "cuda", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "match" in done.stdout


def test_doctor_is_content_here() -> None:
    done = tarry("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
    assert "[11.0, 22.0]" in done.stdout


def test_doctor_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    done = tarry("doctor", CXX="", PATH=str(tmp_path), TARRY_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "apt-get install g++" in done.stdout
    assert "wrong: compiler" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_benchmarks_run_and_write_json(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    done = tarry("bench", "record", "--rounds", "2", "--length", "5", "--json", str(path))
    assert done.returncode == 0, done.stderr
    medians = json.loads(path.read_text())["medians"]
    assert set(medians["add"]) == {"eager", "LTC", "tarry"}, done.stderr
    path = tmp_path / "training.json"
    options = ["--only", "mlp", "--rounds", "1", "--steps", "2", "--backends", "eager", "torchscript"]
    done = tarry("bench", "training", *options, "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout
    (row,) = json.loads(path.read_text())["medians"].values()
    assert set(row) == {"eager", "LTC", "tarry eager", "tarry torchscript"}, done.stdout
