"""The backend that is used when none was chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="a directory in use cannot be removed there")
def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    """torch's compiler cannot be imported there."""
    script = f"""
import os, torch, tarry
os.mkdir({str(tmp_path / "gone")!r})
os.chdir({str(tmp_path / "gone")!r})
os.rmdir({str(tmp_path / "gone")!r})
print((torch.ones(3, device="tarry") * 2).sum().item(), tarry.get_backend().name)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TARRY_BACKEND"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "6.0 eager\n"
    assert "Inductor does not work here" in done.stderr
