"""Every Python example in the documentation is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
GUIDES = ("CONTRIBUTING.md", "benchmarks/README.md", "tests/README.md")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in GUIDES)]
USES_DEVICE = True


def _examples() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for match in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            line = page.read_text()[: match.start()].count("\n") + 1
            found.append((f"{page.relative_to(ROOT)}:{line}", match[1]))
    return found


def test_there_are_examples() -> None:
    assert any(name.startswith("README.md") for name, _ in _examples())


@pytest.mark.parametrize(("name", "source"), _examples(), ids=[name for name, _ in _examples()])
def test_example(name: str, source: str, tmp_path: Path) -> None:
    if source.startswith("# train.py"):  # for several processes
        script = tmp_path / "train.py"
        script.write_text(source)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        subprocess.run(torchrun, check=True, timeout=120)
        return
    try:
        exec(compile(source, name, "exec"), {"__name__": "example"})
    except ModuleNotFoundError as error:
        if name.startswith("docs/frameworks.md"):  # an extra
            pytest.skip(f"{error.name} is not installed")
        raise


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_paths_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
