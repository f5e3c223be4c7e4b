"""Backends come by instance, by name, by entry point and by environment variable."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import tarry
from tarry.errors import BackendError
from tests.backends.simple import Walking, using

USES_DEVICE = True

_MODULE = """
    import tarry
    from tarry.ir.evaluate import evaluate

    class Visitor(tarry.Backend):
        name = "visitor"

        def __init__(self, device="cpu", greeting="hello"):
            super().__init__(device)
            self.greeting = greeting

        def setup(self):
            print(self.greeting, flush=True)

        def teardown(self):
            print("goodbye", flush=True)

        def compile(self, graph):
            return lambda inputs, numbers: evaluate(graph, inputs, numbers)

    def shy():
        return Visitor(greeting="(shyly)")

    def impostor(device="cpu"):
        return "no backend"

    raise_ = None
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with an installed distribution that brings backends."""
    (tmp_path / "visiting.py").write_text(textwrap.dedent(_MODULE))
    info = tmp_path / "visiting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: visiting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tarry.backends]\nvisitor = visiting:Visitor\nshy = visiting:shy\nimpostor = visiting:impostor\n"
        "absent = visiting:Nobody\n"
    )
    return tmp_path


def _python(script: str, site: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(Path(__file__).parent.parent.parent)])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TARRY_BACKEND": "eager", **environment},
    )


_COMPUTE = """
    import torch, tarry
    x = torch.ones(2, device="tarry") + 1
    print(x.tolist(), tarry.get_backend().name)
"""


def test_by_entry_point(site: Path) -> None:
    script = """
        import torch, tarry
        tarry.set_backend("visitor")
        x = torch.ones(2, device="tarry") + 1
        print(x.tolist(), tarry.get_backend())
        tarry.set_backend("shy")
        print((x + 1).tolist())
    """
    result = _python(script, site)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "hello",
        "[2.0, 2.0] <backend 'visitor' on cpu>",
        "goodbye",
        "(shyly)",
        "[3.0, 3.0]",
        "goodbye",
    ]


def test_by_environment_variable(site: Path) -> None:
    result = _python(_COMPUTE, site, TARRY_BACKEND="visitor", TARRY_DEVICE="cpu")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["hello", "[2.0, 2.0] visitor", "goodbye"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("visitr", "there is no backend 'visitr'. Did you mean 'visitor'?"),
        ("impostor", "backend 'impostor': its factory gave 'no backend', which is not a tarry.Backend"),
        ("absent", "Nobody"),
    ],
)
def test_a_wrong_name_in_the_environment_says_so_at_first_use(site: Path, name: str, message: str) -> None:
    result = _python(_COMPUTE, site, TARRY_BACKEND=name)
    assert result.returncode != 0
    assert message in result.stderr
    assert result.stdout == ""


def test_by_instance_and_by_registered_name() -> None:
    mine = Walking()
    with using(mine):
        assert tarry.get_backend() is mine
        assert (torch.ones(2).to("tarry") + 1).tolist() == [2.0, 2.0]
        assert mine.runs == 1
    tarry.register_backend("walker", Walking)
    with using("walker"):
        backend = tarry.get_backend()
        assert isinstance(backend, Walking)
        assert backend is not mine
        (torch.ones(2).to("tarry") + 1).cpu()
        assert backend.runs == 1


def test_unknown_names_list_the_known_ones() -> None:
    before = tarry.get_backend()
    with pytest.raises(BackendError, match=r"there is no backend 'nonesuch'\. Known: .*eager.*null"):
        tarry.set_backend("nonesuch")
    assert tarry.get_backend() is before
