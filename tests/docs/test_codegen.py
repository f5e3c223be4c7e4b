"""The example device of docs/codegen.md: it is fresh, it passes the checks, and it trains as eager does."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tarry
from tarry.codegen.command import Options, run
from tarry.codegen.natives import torch_version
from tarry.events import expect

USES_DEVICE = True
ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "codegen.md"
EXAMPLE = ROOT / "docs" / "examples" / "numpy_device"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    before = set(sys.modules)
    yield import_module("device")
    tarry.set_backend("eager")
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("device", "generated", "numpy_kernels"):
            del sys.modules[name]


def test_the_generated_files_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)
    made_with = json.loads((EXAMPLE / "generated" / "operators.json").read_text())["torch"]
    if made_with != torch_version():
        pytest.skip(f"the example was generated with torch {made_with}")
    files = Path("device.yaml"), Path("generated"), Path("numpy_kernels.py")
    assert run(Options(*files, backend_name="numpy", check=True)) == 0


def test_the_page_runs(example: Any) -> None:
    text = PAGE.read_text()
    names: dict[str, Any] = {"__name__": "example"}
    blocks = list(re.finditer(r"^```python( continued)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 3
    for block in blocks:
        line = text[: block.start(2)].count("\n")
        exec(compile("\n" * line + block[2], str(PAGE), "exec", dont_inherit=True), names)


def test_the_device_trains_as_eager_does(example: Any) -> None:
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
    x, y = torch.randn(16, 20), torch.randint(5, (16,))

    def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    theirs, ours = copy.deepcopy(model), copy.deepcopy(model)
    expected = train(theirs, x, y)
    tarry.set_backend("numpy")
    moved = ours.to("tarry"), x.to("tarry"), y.to("tarry")
    with expect(compiles=2, errors=0) as seen:
        actual = train(*moved)
    fell = {event.fields["op"] for event in seen if event.kind == "fallback"}
    assert not fell - {"aten::tanh_backward"}, fell
    assert actual == pytest.approx(expected, rel=1e-4)


def test_autograd_functions_hold_while_the_backend_is_in_use(example: Any) -> None:
    def gradient() -> list[float]:
        x = torch.tensor([-3.0, 0.5, 3.0], device="tarry", requires_grad=True)
        F.hardtanh(x, -1, 1).sum().backward()  # PyTorch leaves out what has its default
        assert x.grad is not None
        return x.grad.tolist()

    assert gradient() == [0.0, 1.0, 0.0]
    tarry.set_backend("numpy")
    assert gradient() == [1.0, 1.0, 1.0]
    tarry.set_backend("eager")
    assert gradient() == [0.0, 1.0, 0.0]


@pytest.mark.slow
def test_generated_code_passes_the_type_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    files = ["device.py", "numpy_kernels.py", *sorted(f"generated/{p.name}" for p in EXAMPLE.glob("generated/*.py"))]
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path)]
    command = [sys.executable, "-m", "mypy", *options, *files]
    paths = {"MYPYPATH": f"{ROOT}:{EXAMPLE}", "PATH": ""}
    done = subprocess.run(command, cwd=EXAMPLE, env=paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
