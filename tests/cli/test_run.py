"""`tarry run`: ordinary scripts, unmodified, give what they give under plain Python; and Python's own manners."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
# Of each script: its arguments, and how far numbers may be apart. Autocast rounds in other places on a CPU.
CASES = {
    "hf_loop": ([], 0.0),
    "hf_trainer": ([], 0.0),
    "cnn_amp": ([], 5e-3),
    "diffusion": ([], 0.0),
    "reinforce": ([], 0.0),
    "checkpoints": (["--output", "OUT"], 0.0),
    "notebook": ([], 0.0),
}

pytestmark = pytest.mark.slow  # each is a process of its own that loads torch and tarry


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=300)


def tarry_run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "tarry", "run", *arguments, cwd=cwd)


def parts(text: str) -> tuple[str, list[float]]:
    """The text without its numbers, and the numbers."""
    number = r"-?\d+\.?\d*(?:e[+-]?\d+)?"
    return re.sub(number, "#", text), [float(found) for found in re.findall(number, text)]


@pytest.mark.parametrize("name", CASES)
def test_a_script_prints_what_it_prints_without_tarry(name: str, tmp_path: Path) -> None:
    for package in {"hf_loop": ["transformers"], "hf_trainer": ["transformers", "accelerate"]}.get(name, []):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    arguments, tolerance = CASES[name]
    path = str(SCRIPTS / f"{name}.py")
    plain = python(path, *(a.replace("OUT", str(tmp_path / "plain.pt")) for a in arguments), cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    given = [a.replace("OUT", str(tmp_path / "tarry.pt")) for a in arguments]
    lazy = tarry_run("--backend", "eager", path, *given, cwd=tmp_path)
    assert lazy.returncode == 0, lazy.stderr
    assert "steps " in lazy.stderr, "nothing was recorded"
    (expected, numbers), (text, ours) = parts(plain.stdout), parts(lazy.stdout)
    assert text == expected
    assert ours == pytest.approx(numbers, rel=tolerance, abs=0)


def test_a_run_that_is_resumed(tmp_path: Path) -> None:
    path, file = str(SCRIPTS / "checkpoints.py"), str(tmp_path / "a.pt")
    whole = tarry_run("--backend", "eager", path, "--output", str(tmp_path / "b.pt"), "--epochs", "2", cwd=tmp_path)
    tarry_run("--backend", "eager", path, "--output", file, "--epochs", "1", cwd=tmp_path)
    again = tarry_run("--backend", "eager", path, "--output", file, "--resume", file, "--epochs", "2", cwd=tmp_path)
    assert again.returncode == 0
    assert again.stdout == "".join(whole.stdout.splitlines(keepends=True)[1:])
    idle = tarry_run("--backend", "eager", path, "--output", file, "--resume", file, "--epochs", "2", cwd=tmp_path)
    assert idle.returncode == 3  # the script's own


PROGRAM = """
import sys
import torch
from beside import VALUE
print(sys.argv[1:], __name__, __file__, sys.path[0], __package__, VALUE)
embed = torch.nn.Embedding(3, 4).cuda()

def fail():
    loss = embed(torch.tensor([7], device="cuda")).sum()
    return loss.item()

match sys.argv[1]:
    case "read":
        fail()
    case "exit":
        sys.exit(7)
    case "last step":
        loss = embed(torch.tensor([9], device="cuda")).sum()
        loss.backward()
        torch.optim.SGD(embed.parameters(), lr=0.1).step()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("from .part import name\nprint(name, __package__, __spec__.name)\n")
    (package / "part.py").write_text("name = 'part'\n")
    return tmp_path


def test_as_python_runs_it(folder: Path) -> None:
    done = tarry_run("--quiet", "program.py", "exit", "--backend", "x", cwd=folder)
    path = folder / "program.py"
    expected = f"['exit', '--backend', 'x'] __main__ {path} {folder} None 5\n"
    assert (done.returncode, done.stdout, done.stderr) == (7, expected, "")
    done = tarry_run("--quiet", "-m", "package", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "part package package.__main__\n")
    missing = tarry_run("nowhere.py", cwd=folder)
    assert missing.returncode == 2
    assert "can't open file" in missing.stderr


@pytest.mark.parametrize(("case", "backend"), [("read", "eager"), ("last step", "torchscript")])
def test_a_traceback_shows_the_programs_frames(case: str, backend: str, folder: Path) -> None:
    done = tarry_run("--quiet", "--backend", backend, "program.py", case, cwd=folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("IndexError: index out of range in self (while executing aten::emb")
    assert f"{folder / 'program.py'}:" in done.stderr  # the line that recorded the operator
    assert "During handling" not in done.stderr
    assert "tarry/" not in done.stderr
    if case == "read":
        assert "return loss.item()" in done.stderr


def test_nothing_recorded(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("import torch\ntorch.cuda.is_available()\n")
    assert "nothing was recorded" in tarry_run("empty.py", cwd=tmp_path).stderr
    (tmp_path / "plain.py").write_text("import tarry\n")
    assert "nothing was recorded" in python("plain.py", cwd=tmp_path).stderr
    (tmp_path / "used.py").write_text("import tarry, torch\ntorch.ones(2, device='tarry')\n")
    assert python("used.py", cwd=tmp_path).stderr == ""


def test_compared_with_eager(tmp_path: Path) -> None:
    done = tarry_run("--backend", "eager", "--compare-eager", "3", str(SCRIPTS / "diffusion.py"), cwd=tmp_path)
    assert done.returncode == 0
    assert "the losses are the same" in done.stderr
    rows = [line.split("│")[2:4] for line in done.stderr.splitlines() if line.startswith("│")]
    assert len(rows) == 3
    assert all(eager.strip() == lazy.strip() for eager, lazy in rows)
    wrong = tarry_run("--backend", "null", "--compare-eager", "2", str(SCRIPTS / "diffusion.py"), cwd=tmp_path)
    assert "the losses DIFFER from step 1 on" in wrong.stderr  # it computes nothing


def test_compared_with_eager_where_there_is_no_cuda(tmp_path: Path) -> None:
    """A script that does not ask whether there is a device: in eager PyTorch, the CPU takes its place as well."""
    (tmp_path / "hard.py").write_text(
        "import atexit, torch\n"
        "w = torch.ones(3, device='cuda', requires_grad=True)\n"
        "for _ in range(2):\n"
        "    (w * torch.rand(3).cuda()).sum().backward()\n"
        "    torch.optim.SGD([w], lr=0.1).step()\n"
        "atexit.register(lambda: print(torch.ones(1, device='cuda').device.type))\n"
    )
    done = tarry_run("--backend", "eager", "--compare-eager", "2", "hard.py", cwd=tmp_path)
    assert "the losses are the same" in done.stderr
    assert done.stdout == "tarry\n"


def test_wrong_arguments(tmp_path: Path) -> None:
    assert "give a script" in tarry_run(cwd=tmp_path).stderr
    wrong = tarry_run("--backend", "eagre", str(SCRIPTS / "diffusion.py"), cwd=tmp_path)
    assert wrong.returncode == 2
    assert "there is no backend 'eagre'" in wrong.stderr
