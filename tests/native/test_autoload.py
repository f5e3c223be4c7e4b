"""`import torch` loads tarry by its entry point, and never fails because of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRY = "tarry_autoload:autoload"

pytestmark = pytest.mark.process


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["torch.backends"] == {"tarry": ENTRY}
    assert "tarry_autoload" in project["tool"]["setuptools"]["py-modules"]


def _run(program: str, folder: Path, points: str = f"tarry = {ENTRY}", **environment: str) -> tuple[str, str]:
    """Run a program where an installed distribution has these entry points; what it prints, and what it says."""
    distribution = folder / "installed" / "something-1.0.dist-info"
    distribution.mkdir(parents=True, exist_ok=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: something\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text(f"[torch.backends]\n{points}\n")
    path = os.pathsep.join([str(ROOT), str(distribution.parent)])
    settings = os.environ | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"} | environment
    settings.pop("TARRY_COMPILE", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, cwd=folder, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


def test_the_device_is_there_after_import_torch(tmp_path: Path) -> None:
    program = """
import os, torch
device = torch.accelerator.current_accelerator()
os.environ["TARRY_COMPILE"] = "never"                       # as if tarry had not been imported yet
print(device, (torch.ones(3, device=device) + 1).tolist())
import tarry
print(tarry.config.compile, tarry.config.origin("compile"))
"""
    out, said = _run(program, tmp_path)
    assert out == "tarry [2.0, 2.0, 2.0]\nnever TARRY_COMPILE in the environment"
    assert said == ""


def test_a_program_that_does_not_use_it_hears_nothing_of_it(tmp_path: Path) -> None:
    program = "import sys, torch; x = torch.ones(2, requires_grad=True); x.sum().backward(); print(x.grad.tolist())"
    assert _run(program, tmp_path) == ("[1.0, 1.0]", "")


def test_nothing_is_built(tmp_path: Path) -> None:
    program = "import sys, torch; print('tarry' in sys.modules, torch._C._get_privateuse1_backend_name())"
    assert _run(program, tmp_path, TARRY_CACHE_DIR=str(tmp_path / "empty")) == ("False privateuseone", "")
    assert not (tmp_path / "empty").exists()


def test_what_goes_wrong_is_a_warning(tmp_path: Path) -> None:
    out, said = _run("import torch; print(torch.ones(2).tolist())", tmp_path, TARRY_FALLBACK="nonsense")
    assert out == "[1.0, 1.0]"
    assert "tarry could not be loaded with torch" in said
    assert 'is "allow" or "error"' in said


def test_reasons_not_to_load_it(tmp_path: Path) -> None:
    """Each in turn, in one process: what is asked first is changed last."""
    program = """
import sys, types, torch, tarry_autoload
print(tarry_autoload.reason_not_to())
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
torch.cuda.device_count = lambda: 0
print(tarry_autoload.reason_not_to())
torch.cuda.device_count = lambda: 1
print(tarry_autoload.reason_not_to())
sys.argv[0] = "torch/_inductor/compile_worker/__main__.py"
print(tarry_autoload.reason_not_to())
torch.utils.rename_privateuse1_backend("other")
print(tarry_autoload.reason_not_to())
sys.modules["tarry"] = types.ModuleType("tarry")
print(tarry_autoload.reason_not_to())
"""
    out, _ = _run(program, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert [line.split(" (")[0] for line in out.splitlines()] == [
        "None",
        "None",
        "eager training on cuda fails beside a registered device",
        "this process compiles for torch.compile, and needs no device",
        "another extension has registered a device, and PyTorch has room for one",
        "it is imported already",
    ]
    points = f"tarry = {ENTRY}\nother = builtins:print"
    out, _ = _run("import sys, torch; print('tarry' in sys.modules)", tmp_path, points)
    assert out == "False"
