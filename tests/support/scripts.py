"""Programs in a process of their own: the number of devices is fixed once a process has used one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CHIP = ROOT / "docs" / "examples" / "chip"


def run_script(script: str, prelude: str = "", **environment: str) -> str:
    """Run a program that begins with a prelude; what it prints. It can import the example of a card with two chips."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{CHIP}", "TARRY_BACKEND": "eager", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
